#!/usr/bin/env bash
# Makes the root file system of an image, for a processor that need not be this one:
#
#   images/root.sh RELEASE amd64|arm64 FILE.tar [PACKAGE,... [SOURCE...]]
#
# has Debian's C and C++ libraries, certificates, and these packages; and base-files, for the links by which programs find what loads them, and for
# /etc/os-release, without which scanners do not look at Debian's packages. Packages are unpacked only, so none of their programs run; what these
# would have made is made here. A SOURCE is where packages come from: a mirror, or a line as in sources.list [default: Debian, with its updates].
# Takes mmdebstrap, and root.
set -euo pipefail

release=$1 architecture=$2 file=$3 packages=base-files,libc6,libstdc++6,libgcc-s1,ca-certificates${4:+,$4}

# All certificates in one file, as Rust's and OpenSSL's TLS look for them; no documents. Each package is noted, since none is installed. Devices
# are the container engine's. (Of mmdebstrap's hooks only these run where packages are unpacked only.)
mmdebstrap --quiet --variant=extract --skip=output/dev --architectures="$architecture" --include="$packages" \
    --extract-hook='cat "$1"/usr/share/ca-certificates/mozilla/*.crt > "$1/etc/ssl/certs/ca-certificates.crt"' \
    --extract-hook='mkdir "$1/var/lib/dpkg/status.d"; cd "$1/var/cache/apt/archives"
        for package in *.deb; do dpkg-deb --field "$package" > "$1/var/lib/dpkg/status.d/${package%%_*}"; done' \
    --extract-hook='rm -rf "$1"/usr/share/doc "$1"/usr/share/man "$1"/usr/share/locale "$1"/var/lib/apt "$1"/var/cache' \
    "$release" "$file" "${@:5}"
