//! The built fake libraries, for tests that load them: cargo builds a `cdylib` for no tests, those
//! of its own package included.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Why a library is not there.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// This program is not in cargo's target directory.
    #[error(
        "`{program}` is not in a target directory of cargo, so the fake libraries cannot be found beside it"
    )]
    NoTargetDirectory {
        /// The program.
        program: PathBuf,
    },
    /// Cargo cannot be run.
    #[error("cannot run cargo to build `{package}`")]
    Cargo {
        /// What was to be built.
        package: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The build failed; cargo has said why on stderr.
    #[error("cargo could not build `{package}`")]
    Build {
        /// What was to be built.
        package: &'static str,
    },
}

/// The fake `libnvidia-ml.so.1`, built for the profile that this test runs in.
///
/// # Errors
/// It cannot be built.
pub fn nvml() -> Result<PathBuf, ArtifactError> {
    build("tessera-fake-nvml", "libnvidia_ml.so")
}

/// The fake `libcuda.so.1`, built for the profile that this test runs in.
///
/// # Errors
/// It cannot be built.
pub fn cuda() -> Result<PathBuf, ArtifactError> {
    build("tessera-fake-cuda", "libcuda.so")
}

/// A clock that is wrong, to be preloaded; built for the profile that this test runs in.
///
/// # Errors
/// It cannot be built.
pub fn clock() -> Result<PathBuf, ArtifactError> {
    build("tessera-fake-clock", "libtessera_fake_clock.so")
}

/// A clock that goes only while the program waits, to be preloaded; built for the profile that this
/// test runs in.
///
/// # Errors
/// It cannot be built.
pub fn paused_clock() -> Result<PathBuf, ArtifactError> {
    build("tessera-fake-paused-clock", "libtessera_fake_paused_clock.so")
}

/// Builds a library of this workspace for the profile that this test runs in.
fn build(package: &'static str, file: &str) -> Result<PathBuf, ArtifactError> {
    let place = Place::of_this_program(package)?;
    let profile = match place.profile.to_str() {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let directory = place.build("", package, &["--profile", profile])?;
    Ok(directory.join(&place.profile).join(file))
}

/// Builds a package of this workspace, with those options of cargo's, for the machines that
/// `CARGO_BUILD_TARGET` names where this test is built for them. In the directory of that name
/// below cargo's, so that builds with other options are beside it and not in its place. The
/// directory of the profiles.
///
/// # Errors
/// It cannot be built.
pub fn package(
    directory: &str,
    package: &'static str,
    options: &[&str],
) -> Result<PathBuf, ArtifactError> {
    Place::of_this_program(package)?.build(directory, package, options)
}

/// Tells cargo for which machines it builds.
const MACHINE: &str = "CARGO_BUILD_TARGET";

/// Where cargo has put this program: `target/debug`, or `target/aarch64-unknown-linux-gnu/debug`
/// where it was told for which machines.
struct Place {
    target: PathBuf,
    /// Below `target`; empty where nothing was told.
    machine: PathBuf,
    profile: OsString,
}

impl Place {
    fn of_this_program(package: &'static str) -> Result<Self, ArtifactError> {
        let program =
            env::current_exe().map_err(|source| ArtifactError::Cargo { package, source })?;
        let machine = env::var_os(MACHINE);
        Self::of(&program, machine.as_deref()).ok_or(ArtifactError::NoTargetDirectory { program })
    }

    fn of(program: &Path, machine: Option<&OsStr>) -> Option<Self> {
        let parent = program.parent()?;
        let is_below = parent.ends_with("deps") || parent.ends_with("examples");
        let directory = if is_below { parent.parent()? } else { parent };
        let (above, profile) = (directory.parent()?, directory.file_name()?.to_owned());
        match machine {
            Some(machine) if above.ends_with(machine) => {
                Some(Self { target: above.parent()?.to_owned(), machine: machine.into(), profile })
            }
            _ => Some(Self { target: above.to_owned(), machine: PathBuf::new(), profile }),
        }
    }

    /// Quick when it is up to date.
    fn build(
        &self,
        directory: &str,
        package: &'static str,
        options: &[&str],
    ) -> Result<PathBuf, ArtifactError> {
        let target = self.target.join(directory);
        let cargo = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
        let mut command = Command::new(cargo);
        if self.machine.as_os_str().is_empty() {
            command.env_remove(MACHINE);
        }
        let status = command
            .args(["build", "--quiet", "--package", package])
            .args(options)
            .arg("--target-dir")
            .arg(&target)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .map_err(|source| ArtifactError::Cargo { package, source })?;
        if status.success() {
            Ok(target.join(&self.machine))
        } else {
            Err(ArtifactError::Build { package })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(program: &str, machine: Option<&str>) -> [PathBuf; 3] {
        let place =
            Place::of(Path::new(program), machine.map(OsStr::new)).expect("a target directory");
        [place.target, place.machine, place.profile.into()]
    }

    #[test]
    fn programs_and_tests_know_where_cargo_has_put_them() {
        let places = |parts: [&str; 3]| parts.map(PathBuf::from);
        assert_eq!(of("/t/debug/program", None), places(["/t", "", "debug"]));
        assert_eq!(of("/t/debug/deps/test-1f0c", None), places(["/t", "", "debug"]));
        assert_eq!(of("/t/intercept/examples/shown", None), places(["/t", "", "intercept"]));
        let arm = "aarch64-unknown-linux-gnu";
        let of_arm = |program| of(&format!("/t/{arm}/{program}"), Some(arm));
        assert_eq!(of_arm("debug/deps/test-1f0c"), places(["/t", arm, "debug"]));
        assert_eq!(
            of("/t/debug/deps/build-script", Some(arm)),
            places(["/t", "", "debug"]),
            "built for this machine"
        );
    }
}
