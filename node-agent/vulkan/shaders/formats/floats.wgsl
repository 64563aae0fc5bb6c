// Formats of floats: what is loaded are numbers.

alias Loaded = Sixteen;

fn unpacked(loaded: Loaded) -> Sixteen {
    return loaded;
}
