# shellcheck shell=bash
#
# Third-party programs for the trial `executables`: programs of several kinds with their loaders
# and C libraries, installed at /executables of an image, and the bypasses listed in
# docs/reference/intercept-bypasses.md.

# Compiles a program of the interceptor's tests; the compiler options select the kind of program.
executables_compile() { # layer, name of the program, compiler, source, options...
  local source=$repository/intercept/hook/tests/programs/$4.c
  "$3" -O1 -o "$1/executables/$2" "$source" "${@:5}"
}

# 32-bit, without libgcc, whose path depends on gcc's version.
executables_compile_i386() { # layer
  local start end
  start=("$(gcc -m32 -print-file-name=crt1.o)" "$(gcc -m32 -print-file-name=crti.o)")
  end=$(gcc -m32 -print-file-name=crtn.o)
  executables_compile "$1" i386 gcc loaded -m32 -nostdlib "${start[@]}" -lc "$end"
  mkdir -p "$1/usr/lib" "$1/usr/lib32"
  cp --dereference /lib32/ld-linux.so.2 "$1/usr/lib/ld-linux.so.2"
  cp --dereference /lib32/libc.so.6 "$1/usr/lib32/"
  ln -s usr/lib32 "$1/lib32"
}

# A plugin linked with libcuda, by means of an empty library with libcuda's soname.
executables_compile_plugin() { # layer
  local stub=$1/executables/stub.so
  gcc -shared -nostdlib -Wl,-soname,libcuda.so.1 -o "$stub" -x c /dev/null
  executables_compile "$1" linkedplugin.so gcc linkedplugin -shared -fPIC -Wl,--no-as-needed "$stub"
  rm "$stub"
}

executables_check_compilers() {
  if ! command -v musl-gcc >/dev/null || [[ ! -e /lib32/libc.so.6 ]]; then
    echo "cannot build musl and 32-bit programs: run apt-get install musl-tools libc6-dev-i386 (install-deps.sh does)" >&2
    return 1
  fi
}

executables_layer() { # directory
  local layer=$1
  mkdir -p "$layer/executables" "$layer/usr/lib"
  executables_compile "$layer" glibc gcc loaded
  executables_compile "$layer" setuid gcc loaded
  chmod 4755 "$layer/executables/setuid"
  executables_compile "$layer" static gcc loaded -static
  executables_compile "$layer" musl musl-gcc loaded
  cp --dereference /lib/ld-musl-x86_64.so.1 "$layer/usr/lib/"
  executables_compile_i386 "$layer"
  executables_compile "$layer" bypasses gcc bypasses -std=gnu11 -ldl
  executables_compile_plugin "$layer"
}
