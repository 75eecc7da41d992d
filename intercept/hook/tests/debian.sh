# Packages of Debian's releases without installation: for scripts that test the interceptor with
# other C libraries and on other machines.
# shellcheck shell=bash
#
# The script that sources this sets `target`, a directory in which each release gets its own. Each
# function fails if one of its steps fails, also if errors do not end the script.

readonly mirror=http://deb.debian.org/debian

# apt with a state of its own, which knows one release and has nothing installed.
apt_of() { # suite, arguments...
  local place=$target/$1
  apt-get --quiet --quiet -o Dir::Etc::SourceList="$place/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::State="$place/state" -o Dir::State::Status=/dev/null -o Dir::Cache="$place/cache" -o APT::Sandbox::User= "${@:2}"
}

# Begins with an empty directory for packages, and the lists of a release.
know() { # suite, apt's options...
  local place=$target/$1
  rm -rf "$place/root" "$place/packages" "$place/cache" || return
  mkdir -p "$place"/{root,packages,state/lists/partial,cache/archives/partial} || return
  echo "deb $mirror $1 main" >"$place/sources.list" || return
  apt_of "$1" "${@:2}" -o APT::Update::Error-Mode=any update
}

# Unpacks what lies in its directory for packages.
unpack() { # suite
  local package
  for package in "$target/$1"/packages/*.deb; do dpkg-deb --extract "$package" "$target/$1/root" || return; done
}
