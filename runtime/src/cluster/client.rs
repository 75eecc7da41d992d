//! Creates a client from `--kubeconfig`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

/// Errors of creating a client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No file was named, and no default configuration is usable.
    #[error(
        "no cluster is configured, neither by KUBECONFIG nor by a service account: set --kubeconfig"
    )]
    NotFound(#[source] Box<InferConfigError>),
    /// The file cannot be read or parsed.
    #[error("cannot read --kubeconfig {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<KubeconfigError>,
    },
    /// The current context of the file is missing or invalid.
    #[error("invalid current context of --kubeconfig {}", path.display())]
    Context {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<KubeconfigError>,
    },
    /// The configuration is not usable, for example because of a certificate or a proxy.
    #[error("cannot create client from the cluster configuration")]
    Unusable(#[source] Box<kube::Error>),
}

/// Time without a byte from the API server after which a request fails. Lists have no other limit:
/// one that a load balancer accepts and never answers would keep a watch from starting for ever. A
/// watch, which the API server ends after 290 s, is not cut off.
const SILENCE: Duration = Duration::from_secs(300);

/// Returns a client of the cluster of the file's current context. Without a file, `KUBECONFIG` or
/// `~/.kube/config` is used, or else the service account of the pod. Sends no request.
///
/// # Errors
/// [`ClientError`].
pub async fn client(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    client_of(config(kubeconfig).await?)
}

/// Returns a client as [`client`] does that does not repeat requests which the API server has
/// refused with the status of an overloaded server.
///
/// # Errors
/// [`ClientError`].
pub async fn client_without_retries(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    let mut config = config(kubeconfig).await?;
    config.default_retry = false;
    client_of(config)
}

fn client_of(mut config: Config) -> Result<Client, ClientError> {
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    // With several providers linked, rustls has no default. An error means that one is installed
    // already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::try_from(config).map_err(|source| ClientError::Unusable(Box::new(source)))
}

async fn config(kubeconfig: Option<&Path>) -> Result<Config, ClientError> {
    match kubeconfig {
        None => Config::infer().await.map_err(|source| ClientError::NotFound(Box::new(source))),
        Some(path) => from_file(path).await,
    }
}

async fn from_file(path: &Path) -> Result<Config, ClientError> {
    let read = Kubeconfig::read_from(path).map_err(|source| ClientError::Unreadable {
        path: path.to_owned(),
        source: Box::new(source),
    })?;
    Config::from_custom_kubeconfig(read, &KubeConfigOptions::default())
        .await
        .map_err(|source| ClientError::Context { path: path.to_owned(), source: Box::new(source) })
}
