//! Injection modes of the interceptor in a container.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::{build, build_in, intercept, libraries};

/// Directory of the real driver in containers with proxies.
pub(crate) const REAL: &str = "/usr/local/lib/tessera/driver";

/// Directory of the proxies in containers, in place of the driver of an image.
const PROXIES: &str = "/usr/local/lib/driver";

/// Injection mode of the interceptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// No interceptor.
    Bare,
    /// Preloaded into every program.
    Preload,
    /// Proxies replace the driver's libraries.
    Proxy,
    /// Preloaded, and proxies.
    Both,
    /// Preloaded and built for HAMi's variables. The directory of grants exists only if there are
    /// shares.
    Hami,
}

impl Mode {
    /// Modes with an interceptor.
    pub(crate) const INTERCEPTED: [Self; 3] = [Self::Preload, Self::Proxy, Self::Both];

    fn has_proxies(self) -> bool {
        matches!(self, Self::Proxy | Self::Both)
    }

    /// Returns the path of the real driver in the container.
    pub(crate) fn real_cuda(self) -> PathBuf {
        let directory = if self.has_proxies() { Path::new(REAL) } else { libraries() };
        directory.join("libcuda.so.1")
    }

    /// Returns the path by which a program in the container loads the driver.
    pub(crate) fn cuda(self) -> PathBuf {
        let directory = if self.has_proxies() { Path::new(PROXIES) } else { libraries() };
        directory.join("libcuda.so.1")
    }

    /// Returns the script that installs the interceptor. `$etc` is a copy of `/etc` that is not
    /// mounted yet.
    pub(super) fn script(self) -> String {
        let mut script = String::new();
        let mut add = |line: std::fmt::Arguments<'_>| writeln!(script, "{line}").expect("a string");
        let preloaded = match self {
            Self::Preload | Self::Both => Some(intercept()),
            Self::Hami => Some(intercept_for_hami()),
            Self::Bare | Self::Proxy => None,
        };
        if let Some(library) = preloaded {
            add(format_args!("echo {} > \"$etc/ld.so.preload\"", library.display()));
        }
        if self.has_proxies() {
            add(format_args!("mount -t tmpfs tmpfs /usr/local/lib; mkdir -p {REAL} {PROXIES}"));
            for [file, proxy] in proxies() {
                let file = file.display();
                add(format_args!(
                    "cp {}/{file} {REAL}/; cp {} {PROXIES}/{file}",
                    libraries().display(),
                    proxy.display()
                ));
            }
            add(format_args!("export LD_LIBRARY_PATH={PROXIES}"));
        }
        script
    }
}

/// Returns the script that mounts the proxies over the driver's files, and the real files at their
/// private path. Other files in the parent directory stay: images have Python there.
pub(super) fn mount_script(driver: &[PathBuf; 2]) -> String {
    let mut script = format!(
        "shadowed=$(mktemp -d -p /dev)\n\
         mount --rbind /usr/local/lib \"$shadowed\"\n\
         mount -t tmpfs tmpfs /usr/local/lib\n\
         find \"$shadowed\" -mindepth 1 -maxdepth 1 -exec ln -s -t /usr/local/lib {{}} +\n\
         mkdir -p {REAL}\n"
    );
    for (real, [name, proxy]) in driver.iter().zip(proxies()) {
        let [real, name, proxy] = [real, name, proxy].map(|path| path.display());
        writeln!(
            script,
            "touch {REAL}/{name}; mount --bind {real} {REAL}/{name}; mount --bind {proxy} {real}"
        )
        .expect("a string");
    }
    script
}

/// Returns the library built for HAMi's variables, in a directory of its own because the file names
/// are equal.
pub(crate) fn intercept_for_hami() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let options = ["--profile", "intercept", "--features", "hami"];
        build_in("hami", "tessera-intercept", &options, "intercept/libtessera_intercept.so")
    })
}

/// Returns the proxies as they ship, each after the name of the library that it replaces.
pub(crate) fn proxies() -> &'static [[PathBuf; 2]; 2] {
    static BUILT: OnceLock<[[PathBuf; 2]; 2]> = OnceLock::new();
    BUILT.get_or_init(|| {
        let built = |package, file| build(package, &["--profile", "intercept"], file);
        [
            [
                "libcuda.so.1".into(),
                built("tessera-intercept-cuda", "intercept/libtessera_intercept_cuda.so"),
            ],
            [
                "libnvidia-ml.so.1".into(),
                built("tessera-intercept-nvml", "intercept/libtessera_intercept_nvml.so"),
            ],
        ]
    })
}
