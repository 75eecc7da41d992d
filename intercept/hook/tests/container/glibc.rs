//! Another glibc than the machine's in containers: `tests/glibc.sh` names the directory of one in
//! `$TESSERA_GLIBC`.

use std::env;

/// Puts it in place of the machine's, at once: a program that is started between two mounts would
/// find half of each. Nothing where none is named.
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
