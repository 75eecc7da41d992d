//! What is worth a plan.

use k8s_openapi::api::core::v1::Node;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use super::*;

fn planner() -> Planner {
    // With all packages built together rustls has two providers to choose from.
    drop(rustls::crypto::ring::default_provider().install_default());
    let nobody = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    let client = Client::try_from(nobody).unwrap();
    Planner::new(client, "test", Settings::default(), Metrics::new(&mut Registry::default()))
}

fn node(heartbeat: &str, ready: &str) -> Change {
    let condition = json!({"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat});
    let node: Value =
        json!({"metadata": {"name": "node-a"}, "status": {"conditions": [condition]}});
    let node: Node = serde_json::from_value(node).unwrap();
    Change { what: What::Applied(Object::Node(Arc::new(node))), at: Instant::now() }
}

#[tokio::test]
async fn a_heartbeat_of_a_node_is_not_planned_for() {
    let mut planner = planner();
    assert!(planner.apply(node("2026-11-21T00:00:00Z", "True")));
    assert!(!planner.apply(node("2026-11-21T00:05:00Z", "True")));
    assert!(planner.apply(node("2026-11-21T00:10:00Z", "Unknown")));
}
