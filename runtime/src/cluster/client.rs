//! From `--kubeconfig` to a client.

use std::path::{Path, PathBuf};

use kube::config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No file was named, and where a configuration is looked for there is none that can be used.
    #[error(
        "no cluster is configured, neither by KUBECONFIG nor by a service account: set --kubeconfig"
    )]
    NotFound(#[source] Box<InferConfigError>),
    /// The file cannot be read, or is none.
    #[error("--kubeconfig {} cannot be read", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: Box<KubeconfigError>,
    },
    /// What the file's current context names is missing or wrong.
    #[error("the current context of --kubeconfig {} cannot be used", path.display())]
    Context {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: Box<KubeconfigError>,
    },
    /// Of a certificate or a proxy, for example.
    #[error("no client can be made from the cluster's configuration")]
    Unusable(#[source] Box<kube::Error>),
}

/// A client of the cluster that the file's current context names; without a file, of the one that
/// `KUBECONFIG` or `~/.kube/config` names, or else of the one that this pod runs in. Nothing is
/// sent yet.
///
/// # Errors
/// [`ClientError`].
pub async fn client(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    // With several linked in, rustls does not choose. An error means that the process has chosen
    // already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = match kubeconfig {
        None => Config::infer().await.map_err(|source| ClientError::NotFound(Box::new(source)))?,
        Some(path) => of_file(path).await?,
    };
    Client::try_from(config).map_err(|source| ClientError::Unusable(Box::new(source)))
}

async fn of_file(path: &Path) -> Result<Config, ClientError> {
    let read = Kubeconfig::read_from(path).map_err(|source| ClientError::Unreadable {
        path: path.to_owned(),
        source: Box::new(source),
    })?;
    Config::from_custom_kubeconfig(read, &KubeConfigOptions::default())
        .await
        .map_err(|source| ClientError::Context { path: path.to_owned(), source: Box::new(source) })
}
