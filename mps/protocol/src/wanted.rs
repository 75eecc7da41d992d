//! GPUs that need a daemon: written by tessera-driver, read by the supervisor.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs::{self, File},
    io,
};

use tessera_api::names::GpuUuid;

use crate::layout::{MpsPaths, gpu_named};

/// Content of the `wanted` directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantedGpus {
    /// GPUs that need a daemon.
    pub gpus: BTreeSet<GpuUuid>,
    /// File names that are not GPU UUIDs.
    pub invalid_names: BTreeSet<OsString>,
}

/// Requests daemons for exactly these GPUs. Files with other names are not changed. Only
/// tessera-driver calls this: there is one writer.
///
/// # Errors
/// The directory or a file cannot be created or removed. The remaining files may have their old
/// or their new state.
pub fn set_wanted_gpus(paths: &MpsPaths, gpus: &BTreeSet<GpuUuid>) -> io::Result<()> {
    fs::create_dir_all(paths.wanted())?;
    let wanted = read_wanted_gpus(paths)?.gpus;
    for gpu in gpus.difference(&wanted) {
        File::create(paths.wanted_file(gpu))?;
    }
    for gpu in wanted.difference(gpus) {
        fs::remove_file(paths.wanted_file(gpu))?;
    }
    Ok(())
}

/// Returns the wanted GPUs, or an empty set if the directory does not exist.
///
/// # Errors
/// The directory cannot be read.
pub fn read_wanted_gpus(paths: &MpsPaths) -> io::Result<WantedGpus> {
    let entries = match fs::read_dir(paths.wanted()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(WantedGpus::default()),
        entries => entries?,
    };
    let mut wanted = WantedGpus::default();
    for entry in entries {
        let name = entry?.file_name();
        match gpu_named(&name) {
            Some(gpu) => drop(wanted.gpus.insert(gpu)),
            None => drop(wanted.invalid_names.insert(name)),
        }
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(digit: char) -> GpuUuid {
        GpuUuid::new(format!("GPU-{digit}f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77")).expect("a UUID")
    }

    #[test]
    fn want_replaces_the_set_and_is_idempotent() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        assert_eq!(read_wanted_gpus(&paths).expect("empty"), WantedGpus::default());
        for gpus in [
            BTreeSet::from([gpu('1'), gpu('2')]),
            BTreeSet::from([gpu('2'), gpu('3')]),
            BTreeSet::new(),
        ] {
            for _ in 0..2 {
                set_wanted_gpus(&paths, &gpus).expect("written");
                assert_eq!(read_wanted_gpus(&paths).expect("readable").gpus, gpus);
            }
        }
    }

    #[test]
    fn files_with_other_names_are_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        set_wanted_gpus(&paths, &BTreeSet::from([gpu('1')])).expect("written");
        fs::write(paths.wanted().join("README"), "").expect("written");
        set_wanted_gpus(&paths, &BTreeSet::new()).expect("written");
        let invalid_names = BTreeSet::from([OsString::from("README")]);
        assert_eq!(
            read_wanted_gpus(&paths).expect("readable"),
            WantedGpus { gpus: BTreeSet::new(), invalid_names }
        );
    }
}
