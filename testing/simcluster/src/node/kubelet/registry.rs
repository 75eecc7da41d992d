//! Watches the plugin directory and runs the registration handshake with each driver.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::inotify;
use tessera_proto::PLUGIN_TYPE;
use tessera_proto::registration::registration_client::RegistrationClient;
use tessera_proto::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::task::JoinSet;

use super::plugin::{Authority, DraService, HealthService, Plugin, channel};
use super::plugins::PluginRegistry;

/// Pause between attempts. A driver binds its socket before it serves; the kubelet retries after
/// 500 ms, tests need less.
const RETRY: Duration = Duration::from_millis(50);

/// Limit of attempts for a socket without a server. A new socket starts again at zero.
const ATTEMPTS: u32 = 6000;

/// A socket file. A restarted driver creates a new one at the same path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SocketFile {
    path: PathBuf,
    inode: u64,
    changed: i64,
    changed_ns: i64,
}

/// Registers the sockets that appear in `directory` and deregisters those that vanish. Runs until
/// dropped.
pub(crate) async fn watch(directory: PathBuf, plugins: Arc<PluginRegistry>) -> io::Result<()> {
    let mut events = Events::new(&directory)?;
    let mut known = BTreeSet::new();
    let mut handshakes = BTreeMap::new();
    loop {
        let present = sockets(&directory)?;
        for gone in known.difference(&present) {
            // Aborts a handshake in progress.
            handshakes.remove(gone);
            plugins.remove(&gone.path);
        }
        for new in present.difference(&known) {
            let mut handshake = JoinSet::new();
            handshake.spawn(register(new.path.clone(), plugins.clone()));
            handshakes.insert(new.clone(), handshake);
        }
        known = present;
        events.wait().await?;
    }
}

/// An inotify descriptor, read as a pipe: tokio's pipes accept any descriptor.
struct Events(pipe::Receiver);

impl Events {
    fn new(directory: &Path) -> io::Result<Self> {
        let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
        let watched = inotify::WatchFlags::CREATE
            | inotify::WatchFlags::DELETE
            | inotify::WatchFlags::MOVED_FROM
            | inotify::WatchFlags::MOVED_TO;
        let inotify = inotify::init(flags)?;
        inotify::add_watch(&inotify, directory, watched)?;
        Ok(Self(pipe::Receiver::from_owned_fd_unchecked(inotify)?))
    }

    /// Waits for any change. The event is not parsed, since the directory is listed afterwards.
    async fn wait(&mut self) -> io::Result<()> {
        let mut events = [0; 4096];
        self.0.read(&mut events).await.map(drop)
    }
}

fn sockets(directory: &Path) -> io::Result<BTreeSet<SocketFile>> {
    let mut sockets = BTreeSet::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "sock") {
            continue;
        }
        // The file may have been removed meanwhile.
        if let Ok(meta) = std::fs::symlink_metadata(&path) {
            let (inode, changed, changed_ns) = (meta.ino(), meta.ctime(), meta.ctime_nsec());
            sockets.insert(SocketFile { path, inode, changed, changed_ns });
        }
    }
    Ok(sockets)
}

async fn register(socket: PathBuf, plugins: Arc<PluginRegistry>) {
    for _ in 0..ATTEMPTS {
        match handshake(&socket, &plugins).await {
            Ok(()) => return,
            Err(error) => {
                tracing::debug!(socket = %socket.display(), error, "plugin registration failed; retrying")
            }
        }
        tokio::time::sleep(RETRY).await;
    }
    tracing::warn!(socket = %socket.display(), "plugin registration failed; giving up");
}

/// Asks the plugin for its identity, accepts or rejects it, and notifies it. Errors are retried.
async fn handshake(socket: &Path, plugins: &Arc<PluginRegistry>) -> Result<(), String> {
    let channel =
        channel(socket, Authority::SocketPath, None).await.map_err(|error| error.to_string())?;
    let mut client = RegistrationClient::new(channel);
    let info = client
        .get_info(InfoRequest {})
        .await
        .map_err(|status| status.message().to_owned())?
        .into_inner();
    let outcome = accept(socket, info, plugins).await;
    let status = RegistrationStatus {
        plugin_registered: outcome.is_ok(),
        error: outcome.as_ref().err().cloned().unwrap_or_default(),
    };
    client
        .notify_registration_status(status)
        .await
        .map_err(|status| status.message().to_owned())?;
    if let Err(error) = outcome {
        tracing::warn!(socket = %socket.display(), error, "plugin rejected");
    }
    Ok(())
}

async fn accept(
    socket: &Path,
    info: PluginInfo,
    plugins: &Arc<PluginRegistry>,
) -> Result<(), String> {
    if info.r#type != PLUGIN_TYPE {
        return Err(format!("no handler registered for plugin type: {}", info.r#type));
    }
    if info.name.is_empty() || !Path::new(&info.endpoint).is_absolute() {
        return Err("plugin has no name or no absolute endpoint".into());
    }
    let service = DraService::choose(&info.supported_versions)?;
    let health = HealthService::choose(&info.supported_versions);
    let plugin = Plugin::connect(info.name, info.endpoint.into(), service, health)
        .await
        .map_err(|error| format!("create gRPC connection to the plugin: {error}"))?;
    plugins.add(socket.to_owned(), plugin)
}
