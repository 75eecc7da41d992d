//! The built fake libraries, for tests that load them: cargo builds a `cdylib` for no tests, those of its own package included.

use std::env;
use std::ffi::OsString;
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

/// A clock that goes only while the program waits, to be preloaded; built for the profile that this test runs in.
///
/// # Errors
/// It cannot be built.
pub fn paused_clock() -> Result<PathBuf, ArtifactError> {
    build("tessera-fake-paused-clock", "libtessera_fake_paused_clock.so")
}

/// Builds a library of this workspace; quick when it is up to date.
fn build(package: &'static str, file: &str) -> Result<PathBuf, ArtifactError> {
    let program = env::current_exe().map_err(|source| ArtifactError::Cargo { package, source })?;
    let directory = profile_directory(&program)
        .ok_or_else(|| ArtifactError::NoTargetDirectory { program: program.clone() })?;
    let profile = match directory.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let target = directory.parent().unwrap_or(directory);
    let cargo = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let status = Command::new(cargo)
        .args(["build", "--quiet", "--package", package, "--profile", profile, "--target-dir"])
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .map_err(|source| ArtifactError::Cargo { package, source })?;
    if status.success() { Ok(directory.join(file)) } else { Err(ArtifactError::Build { package }) }
}

/// `target/debug` for `target/debug/deps/test-1f0c` and `target/debug/program`.
fn profile_directory(program: &Path) -> Option<&Path> {
    let parent = program.parent()?;
    if parent.ends_with("deps") || parent.ends_with("examples") { parent.parent() } else { Some(parent) }
}
