//! Builds the fake libraries for tests that load them.
//!
//! Cargo does not build a `cdylib` for tests, not even for those of its own package.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

/// Returns the fake `libnvidia-ml.so.1`, built for the profile of this test.
///
/// # Errors
/// The build fails.
pub fn nvml() -> anyhow::Result<PathBuf> {
    build("tessera-fake-nvml", "libnvidia_ml.so")
}

/// Returns the fake `libcuda.so.1`, built for the profile of this test.
///
/// # Errors
/// The build fails.
pub fn cuda() -> anyhow::Result<PathBuf> {
    build("tessera-fake-cuda", "libcuda.so")
}

/// Returns the preload library with the skewed wall clock, built for the profile of this test.
///
/// # Errors
/// The build fails.
pub fn clock() -> anyhow::Result<PathBuf> {
    build("tessera-fake-clock", "libtessera_fake_clock.so")
}

/// Returns the preload library with the virtual clock, built for the profile of this test.
///
/// # Errors
/// The build fails.
pub fn paused_clock() -> anyhow::Result<PathBuf> {
    build("tessera-fake-paused-clock", "libtessera_fake_paused_clock.so")
}

/// Builds a library of this workspace for the profile of this test.
fn build(package: &str, file: &str) -> anyhow::Result<PathBuf> {
    let location = TargetLocation::of_this_program()?;
    let profile = match location.profile.to_str() {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let directory = location.build("", package, &["--profile", profile])?;
    Ok(directory.join(&location.profile).join(file))
}

/// Builds a package of this workspace with options of cargo. The target is that of
/// `CARGO_BUILD_TARGET` if this test was built for it. The output is in a subdirectory of the
/// target directory, so that builds with different options do not replace each other. Returns the
/// directory of the profiles.
///
/// # Errors
/// The build fails.
pub fn package(directory: &str, package: &str, options: &[&str]) -> anyhow::Result<PathBuf> {
    TargetLocation::of_this_program()?.build(directory, package, options)
}

/// Environment variable with cargo's build target.
const TARGET_VARIABLE: &str = "CARGO_BUILD_TARGET";

/// Location of this program in cargo's target directory: `target/debug`, or
/// `target/aarch64-unknown-linux-gnu/debug` with a build target.
struct TargetLocation {
    target: PathBuf,
    /// Path below `target`; empty without a build target.
    triple: PathBuf,
    profile: OsString,
}

impl TargetLocation {
    fn of_this_program() -> anyhow::Result<Self> {
        let program = env::current_exe()?;
        let triple = env::var_os(TARGET_VARIABLE);
        Self::of(&program, triple.as_deref())
            .with_context(|| format!("`{}` is not in a target directory", program.display()))
    }

    fn of(program: &Path, triple: Option<&OsStr>) -> Option<Self> {
        let parent = program.parent()?;
        let is_below = parent.ends_with("deps") || parent.ends_with("examples");
        let directory = if is_below { parent.parent()? } else { parent };
        let (above, profile) = (directory.parent()?, directory.file_name()?.to_owned());
        match triple {
            Some(triple) if above.ends_with(triple) => {
                Some(Self { target: above.parent()?.to_owned(), triple: triple.into(), profile })
            }
            _ => Some(Self { target: above.to_owned(), triple: PathBuf::new(), profile }),
        }
    }

    /// Builds a package; fast if it is up to date.
    fn build(&self, directory: &str, package: &str, options: &[&str]) -> anyhow::Result<PathBuf> {
        let target = self.target.join(directory);
        let cargo = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
        let mut command = Command::new(cargo);
        if self.triple.as_os_str().is_empty() {
            command.env_remove(TARGET_VARIABLE);
        }
        let status = command
            .args(["build", "--quiet", "--package", package])
            .args(options)
            .arg("--target-dir")
            .arg(&target)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .with_context(|| format!("cannot run cargo to build `{package}`"))?;
        ensure!(status.success(), "cargo cannot build `{package}`");
        Ok(target.join(&self.triple))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(program: &str, triple: Option<&str>) -> [PathBuf; 3] {
        let location = TargetLocation::of(Path::new(program), triple.map(OsStr::new))
            .expect("a target directory");
        [location.target, location.triple, location.profile.into()]
    }

    #[test]
    fn finds_location_of_programs_and_tests() {
        let paths = |parts: [&str; 3]| parts.map(PathBuf::from);
        assert_eq!(of("/t/debug/program", None), paths(["/t", "", "debug"]));
        assert_eq!(of("/t/debug/deps/test-1f0c", None), paths(["/t", "", "debug"]));
        assert_eq!(of("/t/intercept/examples/shown", None), paths(["/t", "", "intercept"]));
        let arm = "aarch64-unknown-linux-gnu";
        let of_arm = |program| of(&format!("/t/{arm}/{program}"), Some(arm));
        assert_eq!(of_arm("debug/deps/test-1f0c"), paths(["/t", arm, "debug"]));
        assert_eq!(
            of("/t/debug/deps/build-script", Some(arm)),
            paths(["/t", "", "debug"]),
            "built for the host"
        );
    }
}
