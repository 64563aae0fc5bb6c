# What the scripts read (`.`) that make a folder of the cache once. Such a folder is named by what it is made from.

# once FOLDER COMMAND...: makes FOLDER unless it is there, by COMMAND with the path where it is to be made. Until the script ends, others that
# make folders beside this one wait for it.
once() {
    local made=$1 beside=${1%/*}
    mkdir -p "$beside"
    # Whoever comes second waits, and finds the work done.
    exec 9> "$beside/lock"
    flock 9
    if [ ! -d "$made" ]; then
        rm -rf "$beside/unfinished"
        "${@:2}" "$beside/unfinished"
        mv "$beside/unfinished" "$made"
    fi
}

# What all files of this folder are, in sixteen digits.
contents() {
    find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum | cut -c 1-16
}
