#!/usr/bin/env bash
# Pushes what images/build.sh made, and the chart, to a registry, and says by which digests images and chart are there:
#
#   images/release.sh ghcr.io/prima-dev       or nas.home.arpa:5000/prima-dev, with PLAIN_HTTP=1 where it has no TLS
#
# Takes Python 3.11 or later, and skopeo and Helm, both logged in to the registry. The digests are in target/images/digests.txt, too.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${1:?"images/release.sh REGISTRY/NAMESPACE"}
archive=target/images/prima.tar
lists=target/images/lists.tar
digests=target/images/digests.txt

[ -f "$archive" ] || { echo "$archive is missing: run images/build.sh first" >&2; exit 1; }

# names_in ARCHIVE: NAMESPACE/IMAGE:TAG of what it has.
names_in() {
    tar -xOf "$1" index.json | python3 -c '
import json, sys
for manifest in json.load(sys.stdin)["manifests"]:
    print(manifest["annotations"]["org.opencontainers.image.ref.name"])'
}

# push ARCHIVE NAME: for all platforms, unchanged: the digest there is the one of the archive.
push() {
    skopeo copy --all --preserve-digests ${PLAIN_HTTP:+--dest-tls-verify=false} --digestfile target/images/digest \
        "oci-archive:$1:$2" "docker://$target/${2##*/}"
}

names=$(names_in "$archive")
tag=${names##*:}

python3 images/referrers.py --images "$archive" --lists target/images --output "$lists"
listed=$(names_in "$lists")

# The chart installs the images that it is pushed with: a copy of it names them.
registry=${target%%/*}
namespace=${target#"$registry"} namespace=${namespace#/}
chart=target/images/chart/prima
rm -rf "$chart"
mkdir -p "${chart%/*}"
cp --archive charts/prima "$chart"
sed --in-place "s#^\( *image: \).*/\(.*\):.*#\1$target/\2:$tag#" "$chart/Chart.yaml"
sed --in-place "s#^  registry: .*#  registry: $registry#; s#^\( *repository: \)prima-dev/#\1${namespace:+$namespace/}#" "$chart/values.yaml"

# field NAME: of Chart.yaml, with or without quotes.
field() { sed -n "s/^$1: \"\{0,1\}\([^\"]*\)\"\{0,1\}\$/\1/p" charts/prima/Chart.yaml; }

# If they were built with a TAG of their own, it is a pre-release of that name, and does not take the place of the chart that installs others.
version=$(field version)
[ "$tag" = "$(field appVersion)" ] || version+=-$tag
# Helm notes when files were changed, and in what it pushes when it packed them: the same chart is to have the same digest.
touch --reference=charts/prima/Chart.yaml "$chart"/{Chart,values}.yaml
packed=$(helm package "$chart" --version "$version" --app-version "$tag" --destination target/images)
packed=${packed##* }
touch --reference=charts/prima/Chart.yaml "$packed"

: > "$digests"
for name in $names; do
    push "$archive" "$name"
    echo "$target/${name##*/}@$(cat target/images/digest)" >> "$digests"
done
# Beside each, the list of what it has.
for name in $listed; do
    push "$lists" "$name"
done

# Two lines of Helm's become one as the images have it; others are errors.
helm push ${PLAIN_HTTP:+--plain-http} "$packed" "oci://$target/charts" 2>&1 |
    awk '/^Pushed: / { name = $2; next } /^Digest: / { print name "@" $2; next } { print > "/dev/stderr" }' >> "$digests"
cat "$digests"
