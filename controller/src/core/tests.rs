//! News and no news.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

use super::event::{Change, WatchedObject};
use super::*;

fn node(heartbeat: &str, ready: &str) -> Event {
    let condition = json!({"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat});
    let node: Value =
        json!({"metadata": {"name": "node-a"}, "status": {"conditions": [condition]}});
    let node: Node = serde_json::from_value(node).unwrap();
    let change = Change::Applied(WatchedObject::Node(Arc::new(node)));
    Event::Changed { change, at: Moment::START }
}

#[test]
fn heartbeat_of_node_leads_to_no_plan() {
    let mut core = Core::new(PlanSettings::default());
    let now = Now { monotonic: Moment::START, wall: 0 };
    let listed = WatchedKind::ALL
        .map(|kind| Event::Changed { change: Change::Listed(kind), at: Moment::START });
    let mut plans = |event| core.step(now, event).figures.is_planned;
    assert!(plans(listed.to_vec()));
    assert!(plans(vec![node("2026-11-21T00:00:00Z", "True")]));
    assert!(!plans(vec![node("2026-11-21T00:05:00Z", "True")]));
    assert!(plans(vec![node("2026-11-21T00:10:00Z", "Unknown")]));
}
