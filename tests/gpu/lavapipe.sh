#!/usr/bin/env bash
# Fetches a newer Vulkan on the processor (lavapipe), once, where Debian's own is that of 2022, which takes up to ten times as long to compute (it
# compiles kernels faster, though): its package of the backports, not installed, on the libraries of the older one, which is. Prints the manifest
# that programs find it by (VK_DRIVER_FILES); nothing where the installed one is newer, or where that variable says already which to take.
set -euo pipefail
cd "$(dirname "$0")"
. ../once.sh

. /etc/os-release
release=${VERSION_CODENAME:-} package=mesa-vulkan-drivers
cache=${PRIMA_CACHE:-$HOME/.cache/prima}/lavapipe
folder=$cache/$release-$(uname -m)-$(sha256sum < lavapipe.sh | cut -c 1-16)

main() {
    [ "$release" = bookworm ] && [ -z "${VK_DRIVER_FILES:-}" ] && [[ $(dpkg-query --show --showformat='${Version}' "$package") == 22.* ]] || return 0
    once "$folder" fetch
    echo "$folder/lvp_icd.json"
}

# fetch FOLDER
fetch() {
    echo "fetching a newer lavapipe from Debian's backports (once, 13 MB)" >&2
    mkdir -p "$1/apt/lists/partial"
    (cd "$1" && unpack) >&2
    rm -r "$1/apt" "$1/root"
    cat > "$1/lvp_icd.json" <<< '{"file_format_version": "1.0.0", "ICD": {"library_path": "'"$folder/libvulkan_lvp.so"'", "api_version": "1.3.0"}}'
}

unpack() {
    # A list and an index of its own: this machine's stay as they are. The Release file may be some days old on a mirror.
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg check-valid-until=no] http://deb.debian.org/debian $release-backports main" \
        > apt/sources.list
    local apt=(apt-get -qq -o "Dir::Etc::sourcelist=$PWD/apt/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$PWD/apt/lists"
        -o "Dir::Cache=$PWD/apt" -o APT::Sandbox::User=)
    "${apt[@]}" update
    "${apt[@]}" download "$package"
    dpkg-deb --extract "$package"_*.deb root
    mv root/usr/lib/*/libvulkan_lvp.so .
    rm "$package"_*.deb
    # What it is linked to is installed, as the older one has the same.
    [[ $(ldd libvulkan_lvp.so) != *"not found"* ]]
}

main
