#!/usr/bin/env bash
# setup_webgpu.sh FOLDER: prepare a software Vulkan device below FOLDER, for onnxruntime's WebGPU provider.
# This downloads Debian packages and unpacks them there, without installing them. It writes FOLDER/env.sh for shells to
# source, and FOLDER/device.json for the tests; both expect onnxruntime's plugin in FOLDER/site. If it fails, it prints a
# line on stderr and exits with 1.
set -euo pipefail

MESA='25.*' # supports float16 in shaders; in Debian 12's backports
folder=$(realpath -m "$1")
driver=$folder/driver.json

fail() {
  echo "no software device for WebGPU: $1" >&2
  exit 1
}

[ -e "$folder/device.json" ] && exit 0
command -v apt-get >/dev/null && command -v dpkg >/dev/null || fail "it needs Debian packages, and apt-get is missing"
# shellcheck disable=SC1091
. /etc/os-release
mkdir -p "$folder"/{sources,lists/partial,packages/partial,root}

# The machine's mirrors, and its release's backports on the first mirror that is not for security.
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
"${apt[@]}" update >/dev/null 2>&1 || fail "apt-get update failed"
"${apt[@]}" -y --no-install-recommends -t "${VERSION_CODENAME:-none}-backports" --download-only \
  install libvulkan1 "mesa-vulkan-drivers=$MESA" >/dev/null 2>&1 \
  || fail "Debian ${VERSION_ID:-} has no mesa-vulkan-drivers $MESA, or the download failed"
for package in "$folder"/packages/*.deb; do
  dpkg -x "$package" "$folder/root"
done

libraries=$(dirname "$(find "$folder/root" -name libvulkan_lvp.so | head -n 1)")
[ -e "$libraries/libvulkan_lvp.so" ] || fail "mesa-vulkan-drivers does not contain libvulkan_lvp.so"
printf '{"file_format_version": "1.0.1", "ICD": {"api_version": "1.4.305", "library_path": "%s"}}\n' \
  "$libraries/libvulkan_lvp.so" >"$driver"
cat >"$folder/env.sh" <<EOF
export LD_LIBRARY_PATH=$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export VK_DRIVER_FILES=$driver ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1
export PYTHONPATH=$folder/site\${PYTHONPATH:+:\$PYTHONPATH}
EOF
# A process started without that environment loads these libraries by path, dependencies first.
loaded=$(LD_LIBRARY_PATH=$libraries ldd "$libraries/libvulkan.so.1" "$libraries/libvulkan_lvp.so" \
  | awk -v root="$folder/root/" 'index($3, root) == 1 { print $3 }' | tac)
{
  printf '{"driver": "%s", "libraries": [' "$driver"
  for library in $loaded "$libraries/libvulkan.so.1"; do printf '"%s", ' "$library"; done
  printf '""]}\n'
} >"$folder/device.json"
echo "a software device for WebGPU: . $folder/env.sh"
