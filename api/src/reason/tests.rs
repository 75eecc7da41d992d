use super::*;
use crate::names::NodeName;
use crate::quantity::Quantity;

fn node(name: &str) -> NodeName {
    NodeName::new(name).expect("a node name")
}

fn short_of_memory() -> Reason {
    Reason::Insufficient { capacity: "memory".to_owned() }
}

fn explanation() -> Explanation {
    let mut explanation = Explanation::new();
    explanation.count(Reason::Node(NodeReason::Cordoned), &node("node-c"), 8);
    explanation.count(
        Reason::ClassSelector { class: "h100.gpu.tessera.dev".to_owned() },
        &node("node-b"),
        3,
    );
    explanation.count(
        Reason::ClassSelector { class: "h100.gpu.tessera.dev".to_owned() },
        &node("node-b"),
        1,
    );
    explanation.count_short(short_of_memory(), &node("node-a"), Quantity::from_mib(3072));
    explanation.count_short(short_of_memory(), &node("node-d"), Quantity::from_mib(512));
    explanation
}

#[test]
fn counts_devices_by_reason_nearest_to_a_fit_first() {
    assert_eq!(
        explanation().render(MAX_EVENT_BYTES),
        "0/14 GPUs available: 2 insufficient memory (at least 512Mi short), \
         4 not selected by DeviceClass h100.gpu.tessera.dev, \
         8 on cordoned nodes"
    );
    assert!(
        explanation()
            .render_for("ResourceClaim c", MAX_EVENT_BYTES)
            .starts_with("0/14 GPUs available for ResourceClaim c: 2 insufficient memory")
    );
}

#[test]
fn reports_that_no_devices_are_published() {
    assert_eq!(
        Explanation::new().render(MAX_EVENT_BYTES),
        "0/0 GPUs available: no GPUs are published"
    );
}

#[test]
fn reports_the_node_with_most_available_devices() {
    let mut explanation = Explanation::new();
    let few = Reason::TooFewOnNode { requested: 8 };
    explanation.count(few.clone(), &node("node-b"), 3);
    explanation.count(few, &node("node-a"), 7);
    explanation.count_short(short_of_memory(), &node("node-a"), Quantity::from_mib(512));
    assert_eq!(
        explanation.render(MAX_EVENT_BYTES),
        "10/11 GPUs available: only 7 of 8 requested GPUs are available on node-a, \
         1 insufficient memory (512Mi short)"
    );
}

#[test]
fn counts_reasons_beyond_the_limit() {
    assert_eq!(
        explanation().render(130),
        "0/14 GPUs available: 2 insufficient memory (at least 512Mi short), and 2 more reasons"
    );
    for limit in 90..400 {
        let line = explanation().render(limit);
        assert!(line.len() <= limit, "{} > {limit}: {line}", line.len());
    }
}

#[test]
fn cuts_a_single_reason_that_is_too_long() {
    let mut explanation = Explanation::new();
    explanation.count(Reason::SelectorError { message: "ü".repeat(2000) }, &node("node-a"), 1);
    let line = explanation.render(MAX_EVENT_BYTES);
    assert!(
        line.len() <= MAX_EVENT_BYTES
            && line.starts_with("0/1 GPUs available: 1 with a selector error (ü"),
        "{line}"
    );
}

#[test]
fn merge_adds_devices_and_keeps_the_least_missing_amount() {
    let mut sum = explanation();
    sum.merge(&explanation());
    let (reason, tally) = sum.tallies().next().expect("the nearest reason");
    assert_eq!(reason, &short_of_memory());
    assert_eq!((tally.devices(), tally.nodes().len()), (4, 2));
    assert_eq!(tally.least_missing(), Some(Quantity::from_mib(512)));
}

#[test]
fn groups_devices_by_node() {
    let explanation = explanation();
    let nodes = explanation.by_node();
    let devices = |name| nodes[&node(name)].iter().map(|(_, tally)| tally.devices).sum::<u64>();
    assert_eq!([devices("node-a"), devices("node-b"), devices("node-c")], [1, 4, 8]);
    assert_eq!(nodes[&node("node-a")][0].1.least_missing, Some(Quantity::from_mib(3072)));
}

#[test]
fn serializes_reasons_with_codes() {
    insta::assert_json_snapshot!(explanation(), @r#"
    [
      {
        "code": "Short",
        "message": "insufficient memory",
        "devices": 2,
        "nodes": [
          "node-a",
          "node-d"
        ],
        "leastMissing": "512Mi"
      },
      {
        "code": "ClassSelector",
        "message": "not selected by DeviceClass h100.gpu.tessera.dev",
        "devices": 4,
        "nodes": [
          "node-b"
        ]
      },
      {
        "code": "NodeCordoned",
        "message": "on cordoned nodes",
        "devices": 8,
        "nodes": [
          "node-c"
        ]
      }
    ]
    "#);
}
