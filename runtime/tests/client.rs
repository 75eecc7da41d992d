//! Error messages for an unusable `--kubeconfig`, and the end of requests without an answer.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use tessera_runtime::cluster::{ClientError, client};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;
use tokio::time::Instant;

const ONE_CONTEXT: &str = "
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: one, user: me}}]
clusters: [{name: one, cluster: {server: 'http://127.0.0.1:1'}}]
users: [{name: me, user: {token: t}}]
";

/// Creates a client from a file with this content, and returns the error message.
async fn create(content: &str) -> Result<(), String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), content).unwrap();
    let error = client(Some(file.path())).await.map(drop);
    error.map_err(|error| error.to_string().replace(file.path().to_str().unwrap(), "FILE"))
}

#[tokio::test]
async fn client_sends_no_request() {
    assert_eq!(create(ONE_CONTEXT).await, Ok(()));
}

#[tokio::test]
async fn missing_file_is_named() {
    let error = client(Some(Path::new("/no/such/file"))).await.map(drop).unwrap_err();
    assert!(matches!(error, ClientError::Unreadable { .. }), "{error:?}");
    assert_eq!(error.to_string(), "cannot read --kubeconfig /no/such/file");
}

#[tokio::test]
async fn missing_context_differs_from_malformed_file() {
    let elsewhere = ONE_CONTEXT.replace("current-context: here", "current-context: elsewhere");
    assert_eq!(
        create(&elsewhere).await.unwrap_err(),
        "invalid current context of --kubeconfig FILE"
    );
    assert_eq!(create("{").await.unwrap_err(), "cannot read --kubeconfig FILE");
}

#[tokio::test]
async fn a_list_without_an_answer_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap().to_string();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), ONE_CONTEXT.replace("127.0.0.1:1", &server)).unwrap();
    let nodes: Api<Node> = Api::all(client(Some(file.path())).await.unwrap());
    let list = tokio::spawn(async move { nodes.list(&Default::default()).await });
    let (mut connection, _) = listener.accept().await.unwrap();
    assert!(connection.read(&mut [0; 1024]).await.unwrap() > 0, "the request");
    tokio::time::pause();
    let sent = Instant::now();
    list.await.unwrap().unwrap_err();
    let waited = sent.elapsed();
    let watch = Duration::from_secs(290);
    assert!(waited > watch && waited < 2 * watch, "{waited:?}; a quiet watch lasts for {watch:?}");
}
