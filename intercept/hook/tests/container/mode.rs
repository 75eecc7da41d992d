//! Where the interceptor stands in a container.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::{build, build_in, intercept, libraries};

/// Where the real driver is in containers with proxies.
pub(crate) const REAL: &str = "/usr/local/lib/tessera/driver";

/// Where the test's containers have the proxies, in the place where images have the driver.
const PROXIES: &str = "/usr/local/lib/driver";

/// Where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Nowhere.
    Bare,
    /// In every program.
    Preload,
    /// In the place of the driver's libraries.
    Proxy,
    /// Both.
    Both,
    /// In every program, built for HAMi's variables; and nobody has made a place for grants, unless
    /// there are some.
    Hami,
}

impl Mode {
    /// Those with an interceptor.
    pub(crate) const HELD: [Self; 3] = [Self::Preload, Self::Proxy, Self::Both];

    fn has_proxies(self) -> bool {
        matches!(self, Self::Proxy | Self::Both)
    }

    /// The driver itself, as a program in the container finds it if it knows where.
    pub(crate) fn real_cuda(self) -> PathBuf {
        let directory = if self.has_proxies() { Path::new(REAL) } else { libraries() };
        directory.join("libcuda.so.1")
    }

    /// What a program in the container finds as the driver, by its path.
    pub(crate) fn cuda(self) -> PathBuf {
        let directory = if self.has_proxies() { Path::new(PROXIES) } else { libraries() };
        directory.join("libcuda.so.1")
    }

    /// Puts it in place, when `/etc` is a copy at `$etc` that is not mounted yet.
    pub(super) fn script(self) -> String {
        let mut script = String::new();
        let mut add = |line: std::fmt::Arguments<'_>| writeln!(script, "{line}").expect("a string");
        let preloaded = match self {
            Self::Preload | Self::Both => Some(intercept()),
            Self::Hami => Some(built_for_hami()),
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

/// Puts the proxies over the driver's own files in a container that is otherwise ready, and the
/// real ones at their private place. What else is in the directory where that lies stays: images
/// have Python there.
pub(super) fn mounted(driver: &[PathBuf; 2]) -> String {
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

/// The library as it is built for HAMi's variables; in a directory of its own, since its name is
/// that of the usual one.
pub(crate) fn built_for_hami() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let options = ["--profile", "intercept", "--features", "hami"];
        build_in("hami", "tessera-intercept", &options, "intercept/libtessera_intercept.so")
    })
}

/// The proxies as they ship, each after the name of the library whose place it takes.
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
