//! Which GPUs want a daemon: what tessera-driver writes and the keeper reads.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs::{self, File},
    io,
};

use tessera_api::names::GpuUuid;

use crate::layout::{MpsPaths, gpu_named};

/// What the directory says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// GPUs that want a daemon.
    pub gpus: BTreeSet<GpuUuid>,
    /// Names that are no GPU's.
    pub foreign: BTreeSet<OsString>,
}

/// Has daemons run for exactly these GPUs. What is named otherwise than a GPU is left alone.
/// tessera-driver's side: there is one writer.
///
/// # Errors
/// The directory or a file cannot be made or removed; the others are as they are to be, or as they
/// were.
pub fn want(paths: &MpsPaths, gpus: &BTreeSet<GpuUuid>) -> io::Result<()> {
    fs::create_dir_all(paths.wanted())?;
    let wanted = read(paths)?.gpus;
    for gpu in gpus.difference(&wanted) {
        File::create(paths.wanted_of(gpu))?;
    }
    for gpu in wanted.difference(gpus) {
        fs::remove_file(paths.wanted_of(gpu))?;
    }
    Ok(())
}

/// What is wanted; nothing, where nothing ever was.
///
/// # Errors
/// The directory cannot be read.
pub fn read(paths: &MpsPaths) -> io::Result<Wanted> {
    let entries = match fs::read_dir(paths.wanted()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Wanted::default()),
        entries => entries?,
    };
    let mut wanted = Wanted::default();
    for entry in entries {
        let name = entry?.file_name();
        match gpu_named(&name) {
            Some(gpu) => drop(wanted.gpus.insert(gpu)),
            None => drop(wanted.foreign.insert(name)),
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
    fn exactly_these_are_wanted_however_often_it_is_said() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        assert_eq!(read(&paths).expect("nothing"), Wanted::default());
        for gpus in [
            BTreeSet::from([gpu('1'), gpu('2')]),
            BTreeSet::from([gpu('2'), gpu('3')]),
            BTreeSet::new(),
        ] {
            for _ in 0..2 {
                want(&paths, &gpus).expect("written");
                assert_eq!(read(&paths).expect("readable").gpus, gpus);
            }
        }
    }

    #[test]
    fn what_is_no_gpus_name_is_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let paths = MpsPaths::new(directory.path());
        want(&paths, &BTreeSet::from([gpu('1')])).expect("written");
        fs::write(paths.wanted().join("README"), "").expect("written");
        want(&paths, &BTreeSet::new()).expect("written");
        let foreign = BTreeSet::from([OsString::from("README")]);
        assert_eq!(read(&paths).expect("readable"), Wanted { gpus: BTreeSet::new(), foreign });
    }
}
