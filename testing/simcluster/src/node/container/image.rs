//! Images: a reference resolves to a few files of this machine on an otherwise empty root.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

/// Library directory of Debian and its derivatives, also the place of NVIDIA's libraries in a
/// driver root.
const MULTIARCH: &str = "/usr/lib/x86_64-linux-gnu";

/// A file of this machine and its path in a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    /// Path on this machine.
    pub source: PathBuf,
    /// Absolute path in the container.
    pub target: PathBuf,
}

/// Contents and defaults of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// Files, bind-mounted read-only.
    pub files: Vec<ImageFile>,
    /// Environment set by the image.
    pub env: BTreeMap<String, String>,
    /// Command that runs if the pod names none.
    pub entrypoint: Vec<String>,
    /// If true, the entrypoint is run instead of the pod's command and arguments.
    pub ignores_command: bool,
    /// If true, containers are prepared completely, but their programs are not started.
    pub unstarted: bool,
}

impl Image {
    /// Returns an image with these programs in `/usr/local/bin`, and the libraries that they link
    /// to.
    ///
    /// The first program is the entrypoint.
    ///
    /// # Errors
    /// Returns an error if a program is missing or its libraries cannot be listed.
    pub fn of_programs<P: AsRef<Path>>(programs: &[P]) -> anyhow::Result<Self> {
        let loader = loader()?;
        let mut image = Self::default();
        for program in programs {
            image.add_program(&loader, program.as_ref())?;
        }
        image.env.insert(
            "PATH".into(),
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into(),
        );
        if !libc_is_multiarch(&image.files) {
            // Otherwise the loader does not search the directory in which driver libraries are
            // mounted.
            image.env.insert("LD_LIBRARY_PATH".into(), MULTIARCH.into());
        }
        Ok(image)
    }

    /// Returns this image with its programs not started, but everything else prepared.
    #[must_use]
    pub fn unstarted(self) -> Self {
        Self { unstarted: true, ..self }
    }

    /// Returns this image with a command that the pod cannot change: the entrypoint with `args`.
    #[must_use]
    pub fn with_fixed_args(mut self, args: &[&str]) -> Self {
        self.entrypoint.extend(args.iter().map(|arg| (*arg).to_owned()));
        Self { ignores_command: true, ..self }
    }

    fn add_program(&mut self, loader: &Path, program: &Path) -> anyhow::Result<()> {
        let target = Path::new("/usr/local/bin").join(program.file_name().unwrap_or_default());
        let source = program.canonicalize().with_context(|| {
            format!("no program at `{}`; build it with `make build`", program.display())
        })?;
        for file in libraries(loader, &source)? {
            if !self.files.contains(&file) {
                self.files.push(file);
            }
        }
        if self.entrypoint.is_empty() {
            self.entrypoint = vec![target.display().to_string()];
        }
        self.files.push(ImageFile { source, target });
        Ok(())
    }
}

fn libc_is_multiarch(files: &[ImageFile]) -> bool {
    files.iter().any(|file| file.target.ends_with("x86_64-linux-gnu/libc.so.6"))
}

/// Returns the loader of this process.
fn loader() -> anyhow::Result<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").context("cannot find the loader")?;
    maps.lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .find(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with("ld-linux")))
        .map(PathBuf::from)
        .context("no ld-linux loader among the libraries of this process; containers need glibc")
}

fn libraries(loader: &Path, program: &Path) -> anyhow::Result<Vec<ImageFile>> {
    let failed = || format!("cannot list libraries of `{}`", program.display());
    let output = Command::new(loader)
        .arg("--list")
        .arg(program)
        .env_clear()
        .output()
        .with_context(failed)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}", failed(), errors.trim());
    let mut files = parse_list(&String::from_utf8_lossy(&output.stdout));
    if !files.iter().any(|file| file.target == Path::new("/lib64/ld-linux-x86-64.so.2")) {
        // Path that programs name as their interpreter.
        files.push(ImageFile {
            source: loader.to_owned(),
            target: "/lib64/ld-linux-x86-64.so.2".into(),
        });
    }
    Ok(files)
}

/// Parses `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)` and `/lib64/ld-linux-x86-64.so.2
/// (0x…)`.
fn parse_list(listing: &str) -> Vec<ImageFile> {
    listing
        .lines()
        .filter_map(|line| {
            let path = line.split("=>").last()?.split_whitespace().next()?;
            path.starts_with('/').then(|| ImageFile { source: path.into(), target: path.into() })
        })
        .collect()
}

/// Images by reference.
#[derive(Clone, Debug, Default)]
pub struct ImageStore {
    images: BTreeMap<String, Arc<Image>>,
    fallback: Option<Arc<Image>>,
}

impl ImageStore {
    /// Adds an image, replacing an image of that reference.
    pub fn insert(&mut self, reference: impl Into<String>, image: Image) {
        self.images.insert(reference.into(), Arc::new(image));
    }

    /// Sets the image of all other references.
    pub fn set_fallback(&mut self, image: Image) {
        self.fallback = Some(Arc::new(image));
    }

    /// Returns the image of that reference, or the fallback.
    pub fn get(&self, reference: &str) -> Option<Arc<Image>> {
        self.images.get(reference).or(self.fallback.as_ref()).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loader_list_yields_only_absolute_paths() {
        let listing = "\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let paths: Vec<_> = parse_list(listing).into_iter().map(|file| file.target).collect();
        assert_eq!(
            paths,
            [
                PathBuf::from("/lib/x86_64-linux-gnu/libc.so.6"),
                PathBuf::from("/lib64/ld-linux-x86-64.so.2")
            ]
        );
    }

    #[test]
    fn image_holds_program_and_c_library() {
        let program = std::env::current_exe().unwrap();
        let image = Image::of_programs(&[program]).unwrap();
        assert!(image.entrypoint[0].starts_with("/usr/local/bin/"));
        assert!(image.files.iter().any(|file| file.target.ends_with("libc.so.6")));
        assert!(image.files.iter().any(|file| file.target.ends_with("ld-linux-x86-64.so.2")));
    }

    #[test]
    fn missing_program_is_named_in_error() {
        let error = Image::of_programs(&["/nowhere/tessera-probe"]).unwrap_err();
        assert!(error.to_string().contains("/nowhere/tessera-probe"), "{error}");
    }
}
