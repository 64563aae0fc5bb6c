// Formats of floats: what is loaded are numbers.

alias Loaded = Sixteen;

const NEXT = 1u;

fn unpacked(loaded: Loaded) -> Sixteen {
    return loaded;
}
