//! The request of an eviction, as the API server reads it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::{Arc, Mutex};

use axum::extract::Request;
use axum::response::IntoResponse;
use axum::{Json, Router};
use k8s_openapi::api::policy::v1::Eviction;
use kube::Client;
use serde_json::json;
use tessera_runtime::cluster::{EvictionAnswer, PodEviction, evict};

type Received = Arc<Mutex<Vec<(String, Eviction)>>>;

/// Returns the client of a server that answers with this status, and the evictions that it gets.
fn server(code: u16) -> (Client, Received) {
    let received = Received::default();
    let seen = Arc::clone(&received);
    let serve = move |request: Request| {
        let seen = Arc::clone(&seen);
        async move {
            let uri = request.uri().to_string();
            let body = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap();
            seen.lock().unwrap().push((uri, serde_json::from_slice(&body).unwrap()));
            let status = json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "code": code,
                "status": if code < 300 { "Success" } else { "Failure" }, "message": "why",
            });
            (axum::http::StatusCode::from_u16(code).unwrap(), Json(status)).into_response()
        }
    };
    (Client::new(Router::new().fallback(serve), "default"), received)
}

const EVICTION: PodEviction<'_> = PodEviction {
    namespace: "team-a",
    name: "train",
    uid: "uid-train",
    grace_period: Some(7),
    is_dry_run: false,
};

#[tokio::test]
async fn api_server_reads_uid_grace_period_and_dry_run() {
    let (client, received) = server(201);
    for is_dry_run in [false, true] {
        let answer = evict(&client, PodEviction { is_dry_run, ..EVICTION }).await;
        assert!(matches!(answer, EvictionAnswer::Evicted), "{answer:?}");
        let (uri, body) = received.lock().unwrap().pop().unwrap();
        assert!(uri.starts_with("/api/v1/namespaces/team-a/pods/train/eviction?"), "{uri}");
        assert_eq!(uri.contains("dryRun=All"), is_dry_run, "{uri}");
        let options = body.delete_options.unwrap();
        assert_eq!(options.preconditions.unwrap().uid.as_deref(), Some("uid-train"));
        assert_eq!(options.grace_period_seconds, Some(7));
        assert_eq!(options.dry_run.is_some(), is_dry_run);
    }
}

#[tokio::test]
async fn answers_tell_budgets_from_pods_that_are_gone() {
    let answer_to = async |code| evict(&server(code).0, EVICTION).await;
    assert!(matches!(answer_to(429).await, EvictionAnswer::Refused(why) if why == "why"));
    for code in [404, 409] {
        assert!(matches!(answer_to(code).await, EvictionAnswer::Gone), "{code}");
    }
    for code in [403, 500, 503] {
        assert!(matches!(answer_to(code).await, EvictionAnswer::Failed(_)), "{code}");
    }
}
