#!/usr/bin/env bash
# setup_webgpu.sh FOLDER: prepare a Vulkan device in software below FOLDER, for onnxruntime's WebGPU provider.
# Packages of Debian are downloaded and unpacked there; nothing is installed. Writes FOLDER/env.sh, which a shell sources,
# and FOLDER/device.json, which the tests read; both expect the plugin of onnxruntime in FOLDER/site. Exits with 1, and a line on stderr, where that cannot be done.
set -euo pipefail

MESA='25.*' # float16 in shaders; Debian 12 has it in its backports
folder=$(realpath -m "$1")
driver=$folder/driver.json

refuse() {
  echo "no software device for WebGPU: $1" >&2
  exit 1
}

[ -e "$folder/device.json" ] && exit 0
command -v apt-get >/dev/null && command -v dpkg >/dev/null || refuse "it comes from Debian's packages, and apt-get is missing"
# shellcheck disable=SC1091
. /etc/os-release
mkdir -p "$folder"/{sources,lists/partial,packages/partial,root}

# The machine's own mirrors, and the backports of its release on the first one that is not for security.
for source in /etc/apt/sources.list.d/*.sources; do
  if [ -e "$source" ]; then
    cp "$source" "$folder/sources/"
    sed "s/^Suites:.*/Suites: ${VERSION_CODENAME:-none}-backports/" "$source" \
      | awk -v RS= '/Types/ && !/security/ { print; exit }' >"$folder/sources/backports.sources"
  fi
done
apt=(apt-get -qq -o Dir::Etc::SourceList=/dev/null -o "Dir::Etc::SourceParts=$folder/sources"
  -o "Dir::State::Lists=$folder/lists" -o "Dir::Cache::archives=$folder/packages"
  -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
"${apt[@]}" update >/dev/null 2>&1 || refuse "apt-get update fails"
"${apt[@]}" -y --no-install-recommends -t "${VERSION_CODENAME:-none}-backports" --download-only \
  install libvulkan1 "mesa-vulkan-drivers=$MESA" >/dev/null 2>&1 \
  || refuse "Debian ${VERSION_ID:-} has no mesa-vulkan-drivers $MESA, or they cannot be downloaded"
for package in "$folder"/packages/*.deb; do
  dpkg -x "$package" "$folder/root"
done

libraries=$(dirname "$(find "$folder/root" -name libvulkan_lvp.so | head -n 1)")
[ -e "$libraries/libvulkan_lvp.so" ] || refuse "mesa-vulkan-drivers holds no libvulkan_lvp.so"
printf '{"file_format_version": "1.0.1", "ICD": {"api_version": "1.4.305", "library_path": "%s"}}\n' \
  "$libraries/libvulkan_lvp.so" >"$driver"
cat >"$folder/env.sh" <<EOF
export LD_LIBRARY_PATH=$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export VK_DRIVER_FILES=$driver ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1
export PYTHONPATH=$folder/site\${PYTHONPATH:+:\$PYTHONPATH}
EOF
# Libraries that a process loads by path if it was started without that environment: those that others need come first.
loaded=$(LD_LIBRARY_PATH=$libraries ldd "$libraries/libvulkan.so.1" "$libraries/libvulkan_lvp.so" \
  | awk -v root="$folder/root/" 'index($3, root) == 1 { print $3 }' | tac)
{
  printf '{"driver": "%s", "libraries": [' "$driver"
  for library in $loaded "$libraries/libvulkan.so.1"; do printf '"%s", ' "$library"; done
  printf '""]}\n'
} >"$folder/device.json"
echo "a software device for WebGPU: . $folder/env.sh"
