//! Container output, served at the path that the API server requests from a kubelet.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::stream;
use serde::Deserialize;
use tokio::fs::File;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

use super::Shared;
use crate::node::container::{self, ContainerId};

/// Poll interval of a followed log.
const FOLLOW_EVERY: Duration = Duration::from_millis(50);

pub(crate) async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let router = Router::new()
        .route("/containerLogs/{namespace}/{pod}/{container}", get(handle))
        .with_state(shared);
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "container log server failed");
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct LogQuery {
    follow: bool,
    previous: bool,
    tail_lines: Option<usize>,
    limit_bytes: Option<usize>,
}

async fn handle(
    State(shared): State<Arc<Shared>>,
    Path((namespace, pod, name)): Path<(String, String, String)>,
    Query(query): Query<LogQuery>,
) -> Response {
    let Some(container) = find(&shared, namespace, pod.clone(), &name, query.previous) else {
        let text = format!("container \"{name}\" in pod \"{pod}\" is waiting to start");
        return (StatusCode::BAD_REQUEST, text).into_response();
    };
    if query.follow {
        return follow(shared, container);
    }
    match tokio::fs::read(&container.log).await {
        Ok(output) => apply_limits(output, &query).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

fn find(
    shared: &Shared,
    namespace: String,
    pod: String,
    name: &str,
    previous: bool,
) -> Option<container::Container> {
    let uid = shared
        .pods
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get(&(namespace, pod))
        .cloned()?;
    let mut attempts = shared.runtime.containers(&uid);
    attempts.retain(|container| container.id.name == name);
    attempts.sort_by_key(|container| container.id.attempt);
    attempts.into_iter().rev().nth(usize::from(previous))
}

fn apply_limits(mut output: Vec<u8>, query: &LogQuery) -> Vec<u8> {
    if let Some(lines) = query.tail_lines {
        let end = output.len() - usize::from(output.ends_with(b"\n"));
        let breaks = output[..end].iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
        let from = match lines {
            0 => output.len(),
            lines => breaks.map(|(at, _)| at + 1).nth(lines - 1).unwrap_or(0),
        };
        output.drain(..from);
    }
    if let Some(limit) = query.limit_bytes {
        output.truncate(limit);
    }
    output
}

/// Sends the output so far and new output until the container has ended.
fn follow(shared: Arc<Shared>, container: container::Container) -> Response {
    let follower =
        Follower { shared, id: container.id, path: container.log, file: None, last: false };
    let chunks = stream::try_unfold(follower, |mut follower| async move {
        Ok::<_, io::Error>(follower.next().await?.map(|chunk| (chunk, follower)))
    });
    Body::from_stream(chunks).into_response()
}

struct Follower {
    shared: Arc<Shared>,
    id: ContainerId,
    path: PathBuf,
    file: Option<File>,
    /// True if the container had ended before the last read.
    last: bool,
}

impl Follower {
    async fn next(&mut self) -> io::Result<Option<Bytes>> {
        let mut chunk = vec![0; 16 * 1024];
        loop {
            let file = match &mut self.file {
                Some(file) => file,
                None => self.file.insert(File::open(&self.path).await?),
            };
            match file.read(&mut chunk).await? {
                0 if self.last => return Ok(None),
                0 => {
                    self.last = self.has_ended();
                    if !self.last {
                        tokio::time::sleep(FOLLOW_EVERY).await;
                    }
                }
                count => {
                    chunk.truncate(count);
                    return Ok(Some(chunk.into()));
                }
            }
        }
    }

    fn has_ended(&self) -> bool {
        let containers = self.shared.runtime.containers(&self.id.pod_uid);
        let this = containers.iter().find(|container| container.id == self.id);
        this.is_none_or(|container| {
            matches!(container.state, container::ContainerState::Exited { .. })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail(lines: usize) -> String {
        let query = LogQuery { tail_lines: Some(lines), ..LogQuery::default() };
        String::from_utf8(apply_limits(b"one\ntwo\nthree\n".to_vec(), &query)).unwrap()
    }

    #[test]
    fn tail_returns_whole_lines() {
        assert_eq!(tail(0), "");
        assert_eq!(tail(1), "three\n");
        assert_eq!(tail(2), "two\nthree\n");
        assert_eq!(tail(9), "one\ntwo\nthree\n");
    }

    #[test]
    fn limit_bytes_applies_after_tail() {
        let query = LogQuery { tail_lines: Some(1), limit_bytes: Some(2), ..LogQuery::default() };
        assert_eq!(apply_limits(b"one\ntwo\n".to_vec(), &query), b"tw");
    }
}
