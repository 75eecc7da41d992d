use super::*;
use crate::names::NodeName;
use crate::quantity::Quantity;

fn node(name: &str) -> NodeName {
    NodeName::new(name).expect("a node name")
}

fn short_of_memory() -> Reason {
    Reason::Short { capacity: "memory".to_owned() }
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
fn says_per_reason_how_many_devices_on_how_many_nodes_nearest_to_a_fit_first() {
    assert_eq!(
        explanation().render(MAX_EVENT_BYTES),
        "2 devices on 2 nodes: too little memory left (short by 512Mi at least); \
         4 devices on 1 node: not selected by DeviceClass h100.gpu.tessera.dev; \
         8 devices on 1 node: node is cordoned"
    );
}

#[test]
fn no_devices_at_all_is_said_too() {
    assert_eq!(Explanation::new().render(MAX_EVENT_BYTES), "no devices are published");
}

#[test]
fn what_does_not_fit_into_the_line_is_counted() {
    assert_eq!(
        explanation().render(130),
        "2 devices on 2 nodes: too little memory left (short by 512Mi at least); and 2 more reasons"
    );
    for limit in 60..400 {
        let line = explanation().render(limit);
        assert!(line.len() <= limit, "{} > {limit}: {line}", line.len());
    }
}

#[test]
fn a_single_endless_reason_is_cut() {
    let mut explanation = Explanation::new();
    explanation.count(Reason::SelectorError { message: "ü".repeat(2000) }, &node("node-a"), 1);
    let line = explanation.render(MAX_EVENT_BYTES);
    assert!(
        line.len() <= MAX_EVENT_BYTES
            && line.starts_with("1 device on 1 node: a selector failed (ü"),
        "{line}"
    );
}

#[test]
fn merging_adds_devices_and_keeps_nodes_and_the_least_that_is_missing() {
    let mut sum = explanation();
    sum.merge(&explanation());
    let (reason, tally) = sum.tallies().next().expect("the nearest reason");
    assert_eq!(reason, &short_of_memory());
    assert_eq!((tally.devices(), tally.nodes().len()), (4, 2));
    assert_eq!(tally.least_missing(), Some(Quantity::from_mib(512)));
}

#[test]
fn programs_read_the_same_with_codes() {
    insta::assert_json_snapshot!(explanation(), @r#"
    [
      {
        "code": "Short",
        "message": "too little memory left",
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
        "message": "node is cordoned",
        "devices": 8,
        "nodes": [
          "node-c"
        ]
      }
    ]
    "#);
}
