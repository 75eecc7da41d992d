//! The directory in which drivers show up, and the handshake with each.

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
use super::plugins::Plugins;

/// A driver binds its socket before it serves it; the kubelet tries again after 500 ms, which a
/// test need not.
const RETRY: Duration = Duration::from_millis(50);

/// The kubelet gives up on a socket that nobody serves after some rounds; a new socket starts anew.
const ATTEMPTS: u32 = 6000;

/// A socket file: a driver that starts again makes a new one at the same path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SocketFile {
    path: PathBuf,
    inode: u64,
    changed: i64,
    changed_ns: i64,
}

/// Registers what appears in `directory` and deregisters what vanishes from it. Runs until dropped.
pub(crate) async fn watch(directory: PathBuf, plugins: Arc<Plugins>) -> io::Result<()> {
    let mut events = Events::of(&directory)?;
    let mut known = BTreeSet::new();
    let mut handshakes = BTreeMap::new();
    loop {
        let present = sockets(&directory)?;
        for gone in known.difference(&present) {
            // Aborts a handshake that is still going on.
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

/// An inotify descriptor is read like a pipe, and tokio's pipes take any descriptor.
struct Events(pipe::Receiver);

impl Events {
    fn of(directory: &Path) -> io::Result<Self> {
        let flags = inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC;
        let watched = inotify::WatchFlags::CREATE
            | inotify::WatchFlags::DELETE
            | inotify::WatchFlags::MOVED_FROM
            | inotify::WatchFlags::MOVED_TO;
        let inotify = inotify::init(flags)?;
        inotify::add_watch(&inotify, directory, watched)?;
        Ok(Self(pipe::Receiver::from_owned_fd_unchecked(inotify)?))
    }

    /// What happened is not looked at: the directory itself is, afterwards.
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
        // It may be gone again.
        if let Ok(meta) = std::fs::symlink_metadata(&path) {
            let (inode, changed, changed_ns) = (meta.ino(), meta.ctime(), meta.ctime_nsec());
            sockets.insert(SocketFile { path, inode, changed, changed_ns });
        }
    }
    Ok(sockets)
}

async fn register(socket: PathBuf, plugins: Arc<Plugins>) {
    for _ in 0..ATTEMPTS {
        match handshake(&socket, &plugins).await {
            Ok(()) => return,
            Err(error) => {
                tracing::debug!(socket = %socket.display(), error, "registration failed; trying again")
            }
        }
        tokio::time::sleep(RETRY).await;
    }
    tracing::warn!(socket = %socket.display(), "gave up on registering");
}

/// Asks who is there, takes it or not, and tells it so. An error is worth another try.
async fn handshake(socket: &Path, plugins: &Arc<Plugins>) -> Result<(), String> {
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
        tracing::warn!(socket = %socket.display(), error, "plugin refused");
    }
    Ok(())
}

async fn accept(socket: &Path, info: PluginInfo, plugins: &Arc<Plugins>) -> Result<(), String> {
    if info.r#type != PLUGIN_TYPE {
        return Err(format!("no handler registered for plugin type: {}", info.r#type));
    }
    if info.name.is_empty() || !Path::new(&info.endpoint).is_absolute() {
        return Err("a plugin needs a name and an absolute endpoint".into());
    }
    let service = DraService::choose(&info.supported_versions)?;
    let health = HealthService::choose(&info.supported_versions);
    let plugin = Plugin::connect(info.name, info.endpoint.into(), service, health)
        .await
        .map_err(|error| format!("create gRPC connection to the plugin: {error}"))?;
    plugins.add(socket.to_owned(), plugin)
}
