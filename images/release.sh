#!/usr/bin/env bash
# Pushes what images/build.sh made, and the chart, to a registry, and says by which digests they are there:
#
#   images/release.sh ghcr.io/prima-dev       or nas.home.arpa:5000/prima-dev, with PLAIN_HTTP=1 where it has no TLS
#
# Takes skopeo and Helm, both logged in to the registry. The digests are in target/images/digests.txt, too.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${1:?"images/release.sh REGISTRY/NAMESPACE"}
archive=target/images/prima.tar
digests=target/images/digests.txt

[ -f "$archive" ] || { echo "$archive is missing: run images/build.sh first" >&2; exit 1; }

# As the archive has them: NAMESPACE/IMAGE:TAG.
names=$(tar -xOf "$archive" index.json | python3 -c '
import json, sys
for manifest in json.load(sys.stdin)["manifests"]:
    print(manifest["annotations"]["org.opencontainers.image.ref.name"])')
tag=${names##*:}

# field NAME: of Chart.yaml, with or without quotes.
field() { sed -n "s/^$1: \"\{0,1\}\([^\"]*\)\"\{0,1\}\$/\1/p" charts/prima/Chart.yaml; }

# The chart installs the images that it is pushed with. If they were built with a TAG of their own, it is a pre-release of that name, and
# does not take the place of the chart that installs others.
version=$(field version)
[ "$tag" = "$(field appVersion)" ] || version+=-$tag
chart=$(helm package charts/prima --version "$version" --app-version "$tag" --destination target/images)
chart=${chart##* }
# Helm notes this time in what it pushes: the same chart is to have the same digest.
touch --reference=charts/prima/Chart.yaml "$chart"

: > "$digests"
for name in $names; do
    image=$target/${name##*/}
    # All platforms, unchanged: the digest there is the one of the archive.
    skopeo copy --all --preserve-digests ${PLAIN_HTTP:+--dest-tls-verify=false} --digestfile target/images/digest \
        "oci-archive:$archive:$name" "docker://$image"
    echo "$image@$(cat target/images/digest)" >> "$digests"
done

# Two lines of Helm's become one as the images have it; others are errors.
helm push ${PLAIN_HTTP:+--plain-http} "$chart" "oci://$target/charts" 2>&1 |
    awk '/^Pushed: / { name = $2; next } /^Digest: / { print name "@" $2; next } { print > "/dev/stderr" }' >> "$digests"
cat "$digests"
