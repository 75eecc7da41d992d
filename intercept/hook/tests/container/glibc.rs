//! Replaces the machine's glibc in containers with that of the directory in `$TESSERA_GLIBC`, which
//! `tests/glibc.sh` sets.

use std::env;

/// Returns the script that replaces glibc. One mount replaces all files, because a program that
/// starts between two mounts would load half of each. Empty if the variable is not set.
pub(super) fn script() -> String {
    let Some(glibc) = env::var_os("TESSERA_GLIBC") else { return String::new() };
    format!(
        "own=/usr/lib/x86_64-linux-gnu\nbeside=$(mktemp -d -p /dev)\nmixed=$(mktemp -d -p /dev)\n\
         mount --bind \"$own\" \"$beside\"\n\
         ln -s \"$beside\"/* \"$mixed/\"\n\
         cp --force --remove-destination --dereference {}/*.so* \"$mixed/\"\n\
         mount --bind \"$mixed\" \"$own\"\n",
        std::path::Path::new(&glibc).display()
    )
}
