//! What an operator reads where the flag does not do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use tessera_runtime::cluster::{ClientError, client};

const ONE_CONTEXT: &str = "
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: one, user: me}}]
clusters: [{name: one, cluster: {server: 'http://127.0.0.1:1'}}]
users: [{name: me, user: {token: t}}]
";

/// What is said of a file with this content.
async fn said(content: &str) -> Result<(), String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), content).unwrap();
    let error = client(Some(file.path())).await.map(drop);
    error.map_err(|error| error.to_string().replace(file.path().to_str().unwrap(), "FILE"))
}

#[tokio::test]
async fn a_client_needs_no_server_yet() {
    assert_eq!(said(ONE_CONTEXT).await, Ok(()));
}

#[tokio::test]
async fn a_missing_file_is_named() {
    let error = client(Some(Path::new("/no/such/file"))).await.map(drop).unwrap_err();
    assert!(matches!(error, ClientError::Unreadable { .. }), "{error:?}");
    assert_eq!(error.to_string(), "--kubeconfig /no/such/file cannot be read");
}

#[tokio::test]
async fn a_context_that_the_file_lacks_is_told_from_a_file_that_is_none() {
    let elsewhere = ONE_CONTEXT.replace("current-context: here", "current-context: elsewhere");
    assert_eq!(
        said(&elsewhere).await.unwrap_err(),
        "the current context of --kubeconfig FILE cannot be used"
    );
    assert_eq!(said("{").await.unwrap_err(), "--kubeconfig FILE cannot be read");
}
