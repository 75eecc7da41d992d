//! Device nodes of GPUs in the container of this process.
//!
//! A privileged container gets the device nodes that exist when it starts. A GPU that is added
//! later has its node on the host, where `/dev` of the driver root shows it, and NVML opens it in
//! `/dev`.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use nix::sys::stat::{Mode, SFlag, mknod};

/// Creates the nodes `nvidia<N>` that are in `dev` of the driver root and not in `own`. A node that
/// cannot be created is logged: its GPU is not published then, with the reason.
pub(crate) fn create_missing(driver_root: &Path, own: &Path) {
    let nodes = driver_root.join("dev");
    if nodes == own {
        return;
    }
    for entry in fs::read_dir(nodes).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
        let is_gpu = number.is_some_and(|number| number.parse::<u32>().is_ok());
        let path = own.join(&name);
        let Ok(found) = entry.metadata() else { continue };
        if !is_gpu || !found.file_type().is_char_device() || path.exists() {
            continue;
        }
        let mode = Mode::from_bits_truncate(found.mode());
        match mknod(&path, SFlag::S_IFCHR, mode, found.rdev()) {
            Ok(()) => tracing::info!(path = %path.display(), "device node created"),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "cannot create device node of a GPU");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_missing_nodes_of_gpus_are_created() {
        let directory = tempfile::tempdir().expect("a directory");
        let (root, own) = (directory.path().join("root"), directory.path().join("own"));
        for path in [root.join("dev"), own.clone()] {
            fs::create_dir_all(path).expect("a directory");
        }
        let null = fs::metadata("/dev/null").expect("a device").rdev();
        for name in ["nvidia0", "nvidia1", "nvidiactl", "null"] {
            let made = mknod(&root.join("dev").join(name), SFlag::S_IFCHR, Mode::S_IRUSR, null);
            if made.is_err() {
                tessera_test_support::report_skip("device-nodes", "needs CAP_MKNOD");
                return;
            }
        }
        fs::write(own.join("nvidia1"), "its own").expect("a file");
        create_missing(&root, &own);
        let created = fs::metadata(own.join("nvidia0")).expect("created");
        assert_eq!(created.rdev(), null);
        assert!(fs::metadata(own.join("nvidia1")).expect("kept").is_file());
        assert!(!own.join("nvidiactl").exists() && !own.join("null").exists());
    }
}
