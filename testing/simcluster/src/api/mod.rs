//! The API server stand-in: storage, list, watch, patches, validation and admission over HTTP.
//!
//! What is simplified, on purpose:
//! - no TLS and no authorization: a bearer token names a user, no token is the administrator; only
//!   the admission policies of [`Policies`] look at users;
//! - server-side apply knows no conflicts between managers; `managedFields` are never shown;
//! - validation covers what the parts of this workspace can get wrong, not the whole of Kubernetes;
//! - no taint is put on new nodes for their conditions: the scheduler stand-in looks at the
//!   conditions itself;
//! - CEL expressions are not compiled;
//! - everything is in memory, and gone with the process.
//!
//! What is not: resource versions, conflicts, watches with bookmarks and 410, status subresources,
//! finalizers and graceful deletion, immutable fields, `Status` errors, the pruning of unknown
//! fields.

mod admission;
mod clock;
mod defaults;
mod discovery;
mod door;
mod error;
mod event;
mod fault;
mod kind;
mod lifecycle;
mod log;
mod meta;
mod patch;
pub mod quantity;
mod route;
mod selector;
mod server;
mod store;
mod subresource;
mod table;
mod typed;
mod user;
mod validate;
mod view;
mod watch;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub use self::admission::Policies;
pub use self::discovery::VERSION;
pub use self::error::{ApiError, FieldError};
pub use self::fault::{Fault, FaultHook, RequestInfo, WatchFault, WatchFaultHook};
pub(crate) use self::kind::find_by_kind;
pub use self::kind::{KINDS, Kind, Status};
use self::server::Shared;
pub use self::user::{NODE_NAME_EXTRA, User};
use self::watch::Signals;

/// How the server behaves.
#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// Admission policies in force from the start.
    pub policies: Policies,
    /// Changes kept per resource before the oldest are compacted away.
    pub kept_changes: usize,
    /// Time between bookmarks of a quiet watch.
    pub bookmark_every: Duration,
    /// Time after which a watch ends that asked for no time-out of its own.
    pub watch_timeout: Duration,
    /// Namespaces that exist from the start.
    pub namespaces: Vec<String>,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            policies: Policies::none(),
            // A run of the demo or a test makes a few thousand changes.
            kept_changes: 20_000,
            // As the real server's watch cache.
            bookmark_every: Duration::from_secs(60),
            watch_timeout: Duration::from_secs(30 * 60),
            namespaces: ["default", "kube-system", "kube-public", "kube-node-lease"]
                .map(str::to_owned)
                .to_vec(),
        }
    }
}

/// Why the server did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No port could be taken.
    #[error("cannot listen on 127.0.0.1; is the loopback interface up?")]
    Listen(#[source] std::io::Error),
    /// One of the first namespaces was refused.
    #[error("cannot create namespace `{name}` from the options")]
    Namespace {
        /// Its name.
        name: String,
        /// What is wrong with it.
        source: ApiError,
    },
}

/// What a server that comes back still knows of the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchCache {
    /// Watches go on where they broke off.
    Kept,
    /// As after a real server's start: nothing from before can be continued, watches get 410.
    Fresh,
}

/// A running server. Clones are handles to the same one.
#[derive(Clone)]
pub struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    /// An entrance that is always open and knows no faults, for whoever watches over the test.
    observers: SocketAddr,
    door: tokio::sync::watch::Sender<door::Position>,
    serving: Arc<std::sync::Mutex<Option<JoinHandle<()>>>>,
}

impl ApiServer {
    /// Starts a server on a free port of the loopback interface.
    ///
    /// # Errors
    /// [`StartError`] when no port is free or a namespace of the options is invalid.
    pub async fn start(options: ApiOptions) -> Result<Self, StartError> {
        // Its clients need one, TLS or not; with several linked in (a test of the workspace may),
        // rustls does not choose. An error means that the process has chosen already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(StartError::Listen)?;
        let address = listener.local_addr().map_err(StartError::Listen)?;
        let back = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(StartError::Listen)?;
        let observers = back.local_addr().map_err(StartError::Listen)?;
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            store: Arc::new(store::Store::new(options.kept_changes)),
            tokens: user::Tokens::default(),
            policies: RwLock::new(options.policies),
            signals: Arc::new(Signals {
                close: tokio::sync::watch::Sender::new(0),
                bookmark: tokio::sync::watch::Sender::new(0),
                stop: stop.clone(),
                forgotten: AtomicU64::new(0),
                expired: AtomicU64::new(0),
            }),
            faults: Arc::default(),
            clock: clock::Clock::default(),
            applied: std::sync::Mutex::default(),
            bookmark_every: options.bookmark_every,
            watch_timeout: options.watch_timeout,
        });
        for name in &options.namespaces {
            first_namespace(&shared, name)?;
        }
        let router = Router::new().fallback(server::handle).with_state(shared.clone());
        let unharmed = router.clone().layer(axum::Extension(server::Observer));
        let (door, mover) = door::Door::new(listener, address);
        let serving = tokio::spawn(async move {
            let front =
                axum::serve(door, router).with_graceful_shutdown(stop.clone().cancelled_owned());
            let back = axum::serve(back, unharmed).with_graceful_shutdown(stop.cancelled_owned());
            if let Err(error) = tokio::try_join!(front.into_future(), back.into_future()) {
                tracing::error!(%error, "the API server stand-in ended");
            }
        });
        let serving = Arc::new(std::sync::Mutex::new(Some(serving)));
        Ok(Self { shared, address, observers, door: mover, serving })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its base URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A kubeconfig (YAML) whose token stands for this user. kubectl sends no token over plain HTTP
    /// and is the administrator unless it is called with `--as`.
    pub fn kubeconfig(&self, user: &User) -> String {
        self.kubeconfig_by(self.address, user)
    }

    /// The same by the observers' entrance: it stays open, and no fault applies there.
    pub fn observer_kubeconfig(&self, user: &User) -> String {
        self.kubeconfig_by(self.observers, user)
    }

    fn kubeconfig_by(&self, address: SocketAddr, user: &User) -> String {
        let token = self.shared.tokens.issue(user);
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: sim\n\
             clusters:\n- name: sim\n  cluster:\n    server: http://{address}\n\
             users:\n- name: sim\n  user:\n    token: {token}\n\
             contexts:\n- name: sim\n  context:\n    cluster: sim\n    user: sim\n    namespace: default\n"
        )
    }

    /// Writes [`Self::kubeconfig`] to a file.
    ///
    /// # Errors
    /// What the file system says.
    pub fn write_kubeconfig(&self, user: &User, path: &Path) -> std::io::Result<()> {
        std::fs::write(path, self.kubeconfig(user))
    }

    /// A client for this user, without client-side rate limits.
    pub fn client(&self, user: &User) -> kube::Client {
        self.client_by(self.address, user)
    }

    /// The administrator by the observers' entrance: it stays open, and no fault applies there.
    pub fn observer(&self) -> kube::Client {
        self.client_by(self.observers, &User::admin())
    }

    fn client_by(&self, address: SocketAddr, user: &User) -> kube::Client {
        let url = format!("http://{address}").parse().expect("invariant: an address makes a URL");
        let mut config = kube::Config::new(url);
        config.auth_info.token = Some(self.shared.tokens.issue(user).into());
        kube::Client::try_from(config)
            .expect("invariant: a plain HTTP client needs nothing that can be missing")
    }

    /// Switches admission policies.
    pub fn set_policies(&self, policies: Policies) {
        *self.shared.policies.write().unwrap_or_else(PoisonError::into_inner) = policies;
    }

    /// Lets a hook decide over every request from now on; `None` ends that.
    pub fn set_fault_hook(&self, hook: Option<FaultHook>) {
        self.shared.faults.set(hook);
    }

    /// Lets a hook decide over every event of a watch from now on; `None` ends that.
    pub fn set_watch_fault_hook(&self, hook: Option<WatchFaultHook>) {
        self.shared.faults.set_for_watches(hook);
    }

    /// Sets the clock by which objects are stamped so many seconds ahead of the machine's, or
    /// behind it.
    pub fn set_clock_ahead(&self, seconds: i64) {
        self.shared.clock.set_ahead(seconds);
    }

    /// Goes away as a crash would: nobody listens any more, and every connection breaks at once.
    /// Objects stay. A request under way may or may not be served; nobody hears of it.
    pub fn go_down(&self) {
        if let Some(open) = self.door.send_replace(None) {
            open.cancel();
        }
    }

    /// Comes back after [`Self::go_down`], on the same port, with the objects and versions of
    /// before.
    pub fn come_back(&self, cache: WatchCache) {
        if cache == WatchCache::Fresh {
            self.forget_past();
        }
        self.door.send_replace(Some(CancellationToken::new()));
    }

    /// From now on no watch can be continued from before this moment; running ones go on.
    pub fn forget_past(&self) {
        // The first version that can be continued is one that was handed out after this moment.
        self.shared.signals.forgotten.store(self.shared.store.skip_revision(), Ordering::Relaxed);
    }

    /// How many watches could not be continued since they were from before [`Self::forget_past`].
    pub fn expired_resumptions(&self) -> u64 {
        self.shared.signals.expired.load(Ordering::Relaxed)
    }

    /// The newest resource version.
    pub fn revision(&self) -> u64 {
        self.shared.store.revision()
    }

    /// Compacts as etcd does: who continues from before a resource's last change gets 410.
    pub fn compact(&self) {
        self.shared.store.compact();
    }

    /// Makes every resource version so far too old: running watches get 410 and end, and none can
    /// be continued.
    pub fn expire_watches(&self) {
        self.shared.store.expire();
    }

    /// Breaks the connection of every running watch.
    pub fn close_watches(&self) {
        self.shared.signals.close.send_modify(|count| *count += 1);
    }

    /// Sends a bookmark to every running watch that takes them.
    pub fn send_bookmarks(&self) {
        self.shared.signals.bookmark.send_modify(|count| *count += 1);
    }

    /// Begins to stop, without waiting.
    pub(crate) fn cancel(&self) {
        self.shared.signals.stop.cancel();
    }

    /// Stops serving: watches end, requests under way are answered.
    pub async fn stop(&self) {
        self.cancel();
        let serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut serving) = serving {
            // Idle keep-alive connections of clients would hold a graceful end up for as long as
            // the clients live.
            if tokio::time::timeout(Duration::from_secs(1), &mut serving).await.is_err() {
                serving.abort();
            }
        }
    }
}

fn first_namespace(shared: &Shared, name: &str) -> Result<(), StartError> {
    let user = User::admin();
    let request = lifecycle::Request {
        store: &shared.store,
        kind: kind::find("", "v1", "namespaces").expect("invariant: namespaces are served"),
        namespace: "",
        user: &user,
        policies: Policies::none(),
        now: shared.clock.now(),
    };
    let namespace =
        serde_json::json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    match request.create(namespace) {
        Ok(_) => Ok(()),
        Err(source) => Err(StartError::Namespace { name: name.to_owned(), source }),
    }
}
