//! A fake API server: storage, list, watch, patches, validation and admission over HTTP.
//!
//! Simplified:
//! - no TLS and no authorization: a bearer token names a user, no token is the administrator; only
//!   the admission policies of [`Policies`] check users;
//! - server-side apply ignores conflicts between managers; `managedFields` show only who set a
//!   pod's nomination;
//! - validation covers the fields used in this workspace, not the whole of Kubernetes;
//! - new nodes get no taint for their conditions: the fake scheduler checks the conditions itself;
//! - CEL expressions are not compiled;
//! - everything is in memory and lost when the process ends.
//!
//! As in Kubernetes: resource versions, conflicts, watches with bookmarks and 410, status
//! subresources, finalizers and graceful deletion, immutable fields, `Status` errors, the pruning
//! of unknown fields.

mod admission;
mod clock;
mod defaults;
mod discovery;
mod error;
mod event;
mod fault;
mod kind;
mod lifecycle;
mod listener;
mod log;
mod meta;
mod patch;
mod pod_proxy;
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
pub use self::kind::{KINDS, Kind, StatusSubresource};
use self::listener::{ListenerState, RestartableListener};
use self::server::Shared;
pub use self::user::{NODE_NAME_EXTRA, User};
use self::watch::Signals;

/// Configuration of an [`ApiServer`].
#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// Admission policies in force from the start.
    pub policies: Policies,
    /// Number of changes kept per resource; older ones are compacted.
    pub kept_changes: usize,
    /// Interval of bookmarks in a watch without events.
    pub bookmark_every: Duration,
    /// Time-out of a watch that sets none.
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
            // As in the real server's watch cache.
            bookmark_every: Duration::from_secs(60),
            watch_timeout: Duration::from_secs(30 * 60),
            namespaces: ["default", "kube-system", "kube-public", "kube-node-lease"]
                .map(str::to_owned)
                .to_vec(),
        }
    }
}

/// Error returned when the server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No port is available.
    #[error("cannot listen on 127.0.0.1; is the loopback interface up?")]
    Listen(#[source] std::io::Error),
    /// A namespace of the options was refused.
    #[error("cannot create namespace `{name}` from the options")]
    Namespace {
        /// Name of the namespace.
        name: String,
        /// Cause.
        source: ApiError,
    },
}

/// State of the watch cache after a restart of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchCache {
    /// Watches resume at their resource version.
    Kept,
    /// Empty, as after a restart of a real server: no earlier resource version can be resumed,
    /// watches get 410.
    Fresh,
}

/// A running server. Clones refer to the same server.
#[derive(Clone)]
pub struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    /// Port that always listens and where no faults are injected, for observers of a test.
    observers: SocketAddr,
    listener: tokio::sync::watch::Sender<ListenerState>,
    serving: Arc<std::sync::Mutex<Option<JoinHandle<()>>>>,
}

impl ApiServer {
    /// Starts a server on a free port of the loopback interface.
    ///
    /// # Errors
    /// Returns a [`StartError`] if no port is free or a namespace of the options is invalid.
    pub async fn start(options: ApiOptions) -> Result<Self, StartError> {
        // The clients need a provider even without TLS. If several are linked in, rustls does not
        // choose one. An error means that one is already installed.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(StartError::Listen)?;
        let address = listener.local_addr().map_err(StartError::Listen)?;
        let observer_listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(StartError::Listen)?;
        let observers = observer_listener.local_addr().map_err(StartError::Listen)?;
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            store: Arc::new(store::Store::new(options.kept_changes)),
            tokens: user::Tokens::default(),
            policies: RwLock::new(options.policies),
            signals: Arc::new(Signals {
                close: tokio::sync::watch::Sender::new(0),
                bookmark: tokio::sync::watch::Sender::new(0),
                stop: stop.clone(),
                oldest_cached: AtomicU64::new(0),
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
        let observer_router = router.clone().layer(axum::Extension(server::Observer));
        let (listener, listener_state) = RestartableListener::new(listener, address);
        let serving = tokio::spawn(async move {
            let main = axum::serve(listener, router)
                .with_graceful_shutdown(stop.clone().cancelled_owned());
            let observer = axum::serve(observer_listener, observer_router)
                .with_graceful_shutdown(stop.cancelled_owned());
            if let Err(error) = tokio::try_join!(main.into_future(), observer.into_future()) {
                tracing::error!(%error, "fake API server failed");
            }
        });
        let serving = Arc::new(std::sync::Mutex::new(Some(serving)));
        Ok(Self { shared, address, observers, listener: listener_state, serving })
    }

    /// Returns the listening address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the base URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns a kubeconfig (YAML) whose token identifies this user.
    ///
    /// kubectl sends no token over plain HTTP and is the administrator unless it is called with
    /// `--as`.
    pub fn kubeconfig(&self, user: &User) -> String {
        self.kubeconfig_by(self.address, user)
    }

    /// Returns a kubeconfig for the observer port, which always listens and where no faults are
    /// injected.
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
    /// Returns an error if the file cannot be written.
    pub fn write_kubeconfig(&self, user: &User, path: &Path) -> std::io::Result<()> {
        std::fs::write(path, self.kubeconfig(user))
    }

    /// Returns a client for this user, without client-side rate limits.
    pub fn client(&self, user: &User) -> kube::Client {
        self.client_by(self.address, user)
    }

    /// Returns an administrator's client for the observer port, where no faults are injected.
    pub fn observer(&self) -> kube::Client {
        self.client_by(self.observers, &User::admin())
    }

    fn client_by(&self, address: SocketAddr, user: &User) -> kube::Client {
        let url =
            format!("http://{address}").parse().expect("invariant: an address forms a valid URL");
        let mut config = kube::Config::new(url);
        config.auth_info.token = Some(self.shared.tokens.issue(user).into());
        kube::Client::try_from(config)
            .expect("invariant: a plain HTTP client has no fallible parts")
    }

    /// Sets the admission policies in force.
    pub fn set_policies(&self, policies: Policies) {
        *self.shared.policies.write().unwrap_or_else(PoisonError::into_inner) = policies;
    }

    /// Sets the hook that decides on every request; `None` removes it.
    pub fn set_fault_hook(&self, hook: Option<FaultHook>) {
        self.shared.faults.set(hook);
    }

    /// Sets the hook that decides on every watch event; `None` removes it.
    pub fn set_watch_fault_hook(&self, hook: Option<WatchFaultHook>) {
        self.shared.faults.set_for_watches(hook);
    }

    /// Sets the clock for object timestamps to this many seconds ahead of the machine's (negative:
    /// behind).
    pub fn set_clock_ahead(&self, seconds: i64) {
        self.shared.clock.set_ahead(seconds);
    }

    /// Simulates a crash: the port closes and every connection breaks.
    ///
    /// Objects are kept. Requests in progress may or may not be served; no response is sent.
    pub fn simulate_crash(&self) {
        if let Some(open) = self.listener.send_replace(None) {
            open.cancel();
        }
    }

    /// Restarts after [`Self::simulate_crash`], on the same port, with the same objects and
    /// versions.
    pub fn restart_after_crash(&self, cache: WatchCache) {
        if cache == WatchCache::Fresh {
            self.reset_watch_cache();
        }
        self.listener.send_replace(Some(CancellationToken::new()));
    }

    /// Makes all earlier resource versions impossible to resume. Running watches continue.
    pub fn reset_watch_cache(&self) {
        // The first resumable version is one issued after this moment.
        self.shared
            .signals
            .oldest_cached
            .store(self.shared.store.skip_revision(), Ordering::Relaxed);
    }

    /// Returns the number of watches that could not be resumed because of
    /// [`Self::reset_watch_cache`].
    pub fn expired_resumptions(&self) -> u64 {
        self.shared.signals.expired.load(Ordering::Relaxed)
    }

    /// Returns the newest resource version.
    pub fn revision(&self) -> u64 {
        self.shared.store.revision()
    }

    /// Compacts as etcd does: resuming from before a resource's last change gets 410.
    pub fn compact(&self) {
        self.shared.store.compact();
    }

    /// Expires all resource versions: running watches end with 410, and none can be resumed.
    pub fn expire_watches(&self) {
        self.shared.store.expire();
    }

    /// Breaks the connection of every running watch.
    pub fn close_watches(&self) {
        self.shared.signals.close.send_modify(|count| *count += 1);
    }

    /// Sends a bookmark to every running watch that accepts them.
    pub fn send_bookmarks(&self) {
        self.shared.signals.bookmark.send_modify(|count| *count += 1);
    }

    /// Begins to stop, without waiting.
    pub(crate) fn cancel(&self) {
        self.shared.signals.stop.cancel();
    }

    /// Stops serving: watches end, requests in progress are served.
    pub async fn stop(&self) {
        self.cancel();
        let serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut serving) = serving {
            // Idle keep-alive connections would delay a graceful shutdown as long as the clients
            // live.
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
        manager: "simcluster",
        policies: Policies::none(),
        now: shared.clock.now(),
        dry_run: false,
    };
    let namespace =
        serde_json::json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    match request.create(namespace) {
        Ok(_) => Ok(()),
        Err(source) => Err(StartError::Namespace { name: name.to_owned(), source }),
    }
}
