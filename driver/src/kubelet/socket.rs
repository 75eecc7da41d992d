//! Unix sockets in the kubelet's directories.

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};
use sha2::{Digest, Sha256};
use tokio::net::UnixListener;

/// Errors of binding a socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The path is too long for a socket address.
    #[error("socket path `{path}` has {length} bytes, more than {MAX_PATH_BYTES}: choose a shorter --kubelet-root", path = .path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
        /// The length in bytes.
        length: usize,
    },
    /// A file that is not a socket has the path.
    #[error("`{path}` exists and is not a socket: remove it", path = .path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// An operation failed.
    #[error("cannot {operation} `{path}`", path = .path.display())]
    Io {
        /// The operation.
        operation: &'static str,
        /// The path.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
}

/// Longest path: `sun_path` has 108 bytes, the last of which is NUL.
const MAX_PATH_BYTES: usize = 107;

/// Paths of this instance's two sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketPaths {
    /// The socket of the DRA and health services.
    pub plugin: PathBuf,
    /// The socket of the registration service.
    pub registration: PathBuf,
}

impl SocketPaths {
    /// Returns the sockets of `driver` below the kubelet's root directory. With a pod UID the names
    /// are unique to the instance, so that during a rolling update the old and the new instance
    /// serve at the same time (KEP-4381, from 1.33).
    ///
    /// # Errors
    /// [`SocketError::TooLong`].
    pub fn new(
        kubelet_root: &Path,
        driver: &str,
        pod_uid: Option<&str>,
    ) -> Result<Self, SocketError> {
        let plugins = kubelet_root.join("plugins").join(driver);
        let registry = kubelet_root.join("plugins_registry");
        let (plugin, registration) = match pod_uid {
            None => (plugins.join("dra.sock"), registry.join(format!("{driver}@reg.sock"))),
            Some(uid) => (
                plugins.join(format!("dra-{uid}.sock")),
                registration_of_instance(&registry, driver, uid),
            ),
        };
        fits(&plugin)?;
        fits(&registration)?;
        Ok(Self { plugin, registration })
    }
}

/// Returns the first name that fits, of the names that the kubelet plugin library tries, with `@`
/// in place of the last dash (docs/design/driver.md).
///
/// kubelet 1.37 sends the percent-encoded path of this socket as `:authority`, and the crate
/// `http`, used by tonic, accepts a `%` only in the user part, which ends at `@`.
fn registration_of_instance(registry: &Path, driver: &str, uid: &str) -> PathBuf {
    let short = base64_url(&Sha256::digest(uid)[..8]);
    let shortest = base64_url(&Sha256::digest(format!("{driver}\0{uid}"))[..16]);
    let names = [format!("{driver}-{uid}@reg.sock"), format!("{driver}-{short}@reg.sock")];
    let paths = names.map(|name| registry.join(name));
    let fitting = paths.into_iter().find(|path| fits(path).is_ok());
    fitting.unwrap_or_else(|| registry.join(format!("dra-{shortest}@reg.sock")))
}

fn fits(path: &Path) -> Result<(), SocketError> {
    let length = path.as_os_str().len();
    if length > MAX_PATH_BYTES {
        return Err(SocketError::TooLong { path: path.to_owned(), length });
    }
    Ok(())
}

/// Encodes bytes as RFC 4648 base64 with the URL alphabet and without padding.
fn base64_url(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let mut block = [0; 4];
        block[1..=chunk.len()].copy_from_slice(chunk);
        let block = u32::from_be_bytes(block);
        for position in 0..=chunk.len() {
            let index = block >> (18 - 6 * position) & 63;
            text.push(char::from(ALPHABET[index as usize]));
        }
    }
    text
}

/// A listening socket. Dropping it removes its file, unless another socket has the name.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    identity: Identity,
}

/// Device, inode and time of change: some file systems reuse inodes immediately.
type Identity = (u64, u64, i64, i64);

fn identity(path: &Path) -> io::Result<Identity> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino(), metadata.ctime(), metadata.ctime_nsec()))
}

impl Socket {
    /// Binds `path`, and replaces a socket that an earlier process left there.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn bind(path: &Path) -> Result<(Self, UnixListener), SocketError> {
        fits(path)?;
        let directory = path.parent().expect("invariant: the path of a socket has a parent");
        fs::create_dir_all(directory).map_err(io_error("create", directory))?;
        remove_socket(path)?;
        let listener = UnixListener::bind(path).map_err(io_error("bind", path))?;
        let identity = identity(path).map_err(io_error("stat", path))?;
        Ok((Self { path: path.to_owned(), identity }, listener))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let is_own = identity(&self.path).is_ok_and(|found| found == self.identity);
        if is_own && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove socket");
        }
    }
}

fn remove_socket(path: &Path) -> Result<(), SocketError> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(SocketError::Io { operation: "stat", path: path.to_owned(), source }),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            Err(SocketError::NotASocket { path: path.to_owned() })
        }
        Ok(_) => fs::remove_file(path).map_err(io_error("remove", path)),
    }
}

/// Removes sockets of dead instances: named as sockets of this driver, with no process listening.
/// Returns their paths.
#[must_use]
pub fn remove_abandoned(kubelet_root: &Path, driver: &str) -> Vec<PathBuf> {
    let plugins = kubelet_root.join("plugins").join(driver);
    let registry = kubelet_root.join("plugins_registry");
    let mut removed = sweep(&plugins, |name| name.starts_with("dra") && name.ends_with(".sock"));
    // Names with a hash do not identify the driver, and stay.
    let prefix = format!("{driver}-");
    removed
        .extend(sweep(&registry, |name| name.starts_with(&prefix) && name.ends_with("@reg.sock")));
    removed
}

fn sweep(directory: &Path, is_ours: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let sockets = entries
        .filter(|entry| entry.file_name().to_str().is_some_and(&is_ours))
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()));
    let abandoned = sockets.map(|entry| entry.path()).filter(|path| is_abandoned(path));
    abandoned.filter(|path| fs::remove_file(path).is_ok()).collect()
}

/// Returns true if no process listens. Does not block if the backlog of a listener is full.
fn is_abandoned(path: &Path) -> bool {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (Ok(socket), Ok(address)) = (
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None),
        SocketAddrUnix::new(path),
    ) else {
        return false;
    };
    connect(&socket, &address) == Err(Errno::CONNREFUSED)
}

fn io_error(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SocketError {
    let path = path.to_owned();
    move |source| SocketError::Io { operation, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "6a3f3b1e-0d5c-4f6e-9c59-2b1d7d4c8e11";

    #[test]
    fn instance_without_pod_uid_has_plain_names() {
        let paths = SocketPaths::new(Path::new("/var/lib/kubelet"), "gpu.tessera.dev", None)
            .expect("short enough");
        assert_eq!(paths.plugin, Path::new("/var/lib/kubelet/plugins/gpu.tessera.dev/dra.sock"));
        assert_eq!(
            paths.registration,
            Path::new("/var/lib/kubelet/plugins_registry/gpu.tessera.dev@reg.sock")
        );
    }

    #[test]
    fn instance_names_get_shorter_until_they_fit() {
        let at = |root: &str| {
            let paths = SocketPaths::new(Path::new(root), "gpu.tessera.dev", Some(UID))?;
            Ok::<_, SocketError>(
                paths.registration.file_name().expect("a name").to_str().expect("text").to_owned(),
            )
        };
        assert_eq!(
            at("/var/lib/kubelet").expect("fits"),
            format!("gpu.tessera.dev-{UID}@reg.sock")
        );
        // Expected values from Go's base64.RawURLEncoding and crypto/sha256.
        let long = format!("/{}", "k".repeat(24));
        assert_eq!(
            at(&long).expect("fits").len(),
            "gpu.tessera.dev-".len() + 36 + "@reg.sock".len()
        );
        assert!(matches!(at(&format!("/{}", "k".repeat(60))), Err(SocketError::TooLong { .. })));
    }

    #[test]
    fn registration_name_falls_back_to_hashes() {
        let registry = |length: usize| PathBuf::from(format!("/{}", "r".repeat(length - 1)));
        let name = |length| {
            let path = registration_of_instance(&registry(length), "gpu.tessera.dev", UID);
            path.file_name().expect("a name").to_str().expect("text").to_owned()
        };
        assert_eq!(name(45), format!("gpu.tessera.dev-{UID}@reg.sock"));
        let short = name(46);
        assert!(short.starts_with("gpu.tessera.dev-") && short.len() == 16 + 11 + 9, "{short}");
        let shortest = name(71);
        assert!(shortest.starts_with("dra-") && shortest.len() == 4 + 22 + 9, "{shortest}");
    }

    #[test]
    fn base64_matches_rfc_4648() {
        let vectors = [
            ("", ""),
            ("f", "Zg"),
            ("fo", "Zm8"),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg"),
            ("fooba", "Zm9vYmE"),
        ];
        for (bytes, text) in vectors {
            assert_eq!(base64_url(bytes.as_bytes()), text);
        }
        assert_eq!(base64_url(&[0xfb, 0xff]), "-_8");
    }

    #[tokio::test]
    async fn replaces_stale_socket_and_removes_own() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("deep/dra.sock");
        let (first, listener) = Socket::bind(&path).expect("bound");
        drop(listener);
        let (second, _listener) = Socket::bind(&path).expect("bound again");
        drop(first);
        assert!(path.exists(), "the second socket has the name");
        drop(second);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn keeps_file_that_is_not_a_socket() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("dra.sock");
        fs::write(&path, "precious").expect("written");
        assert!(matches!(Socket::bind(&path), Err(SocketError::NotASocket { .. })));
        assert!(path.exists());
    }

    #[tokio::test]
    async fn removes_only_sockets_without_listener() {
        let directory = tempfile::tempdir().expect("a directory");
        let root = directory.path();
        let alive = SocketPaths::new(root, "d", Some("alive")).expect("short");
        let dead = SocketPaths::new(root, "d", Some("dead")).expect("short");
        let (_a, _b) = (
            Socket::bind(&alive.plugin).expect("bound"),
            Socket::bind(&alive.registration).expect("bound"),
        );
        for path in [&dead.plugin, &dead.registration] {
            let (socket, listener) = Socket::bind(path).expect("bound");
            drop(listener);
            std::mem::forget(socket);
        }
        let foreign = root.join("plugins_registry/other@reg.sock");
        let (socket, listener) = Socket::bind(&foreign).expect("bound");
        drop(listener);
        std::mem::forget(socket);

        assert_eq!(remove_abandoned(root, "d"), [dead.plugin, dead.registration]);
        assert!(alive.plugin.exists() && alive.registration.exists() && foreign.exists());
    }
}
