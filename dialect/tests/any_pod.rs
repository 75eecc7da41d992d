//! Properties of the conversion of any pod, also of one that is no pod.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::cell::Cell;
use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::TestRunner;
use serde_json::{Map, Value, json};
use tessera_dialect::{
    Converter, Dialect, LeaveReason, NamespaceView, Settings, Trigger, Verdict, descriptions,
};

const AMOUNTS: &[&str] = &["0", "1", "1", "2", "20", "30", "100"];

/// Values that a tenant writes where a dialect reads amounts, lists or switches.
const VALUES: &[&str] = &[
    "0",
    "1",
    "2",
    "30",
    "100",
    "101",
    "3000",
    "2147483648",
    "-1",
    "0.5",
    "1Gi",
    "",
    "true",
    "force",
    "A100,h100",
    ",",
    "\"",
    "é\\u0000",
    "binpack",
    "numa-strict",
    "{\"requests\": {}}",
    "{",
    "[]",
];

const VARIABLES: &[&str] =
    &["CUDA_DISABLE_CONTROL", "GPU_CORE_UTILIZATION_POLICY", "CUDA_MEM_OVERSOLD"];

const SCHEDULERS: &[&str] =
    &["", "default-scheduler", "hami-scheduler", "kai-scheduler", "volcano"];

fn names(dialect: Dialect) -> (Vec<String>, Vec<String>) {
    let all = descriptions();
    let own = all.iter().find(|description| description.dialect == dialect).unwrap();
    let (mut resources, mut annotations) = (Vec::new(), own.annotations.clone());
    annotations.extend(own.written.clone());
    for trigger in &own.triggers {
        match trigger {
            Trigger::Resource(name) => resources.push(name.clone()),
            Trigger::Annotation(name) => annotations.push(name.clone()),
        }
    }
    // Names of no dialect are amounts that must stay.
    resources.extend(["cpu".to_owned(), "example.com/dongle".to_owned()]);
    annotations.push("example.com/note".to_owned());
    (resources, annotations)
}

/// Amounts mostly; text and other JSON, which the API server would refuse, now and then.
fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        40 => select(AMOUNTS).prop_map(Value::from),
        4 => select(VALUES).prop_map(Value::from),
        1 => Just(json!(null)),
        1 => Just(json!({"a": [1]})),
        1 => any::<String>().prop_map(Value::from),
    ]
}

fn object(names: Vec<String>) -> impl Strategy<Value = Value> {
    vec((select(names), value()), 0..4)
        .prop_map(|fields| Value::Object(fields.into_iter().collect::<Map<_, _>>()))
}

fn container(resources: Vec<String>) -> impl Strategy<Value = Value> {
    let name = any::<u32>().prop_map(|number| format!("c{}", number % 1_000));
    let limits = prop_oneof![6 => object(resources.clone()), 1 => Just(json!(null))];
    let requests = prop_oneof![1 => object(resources.clone()), 9 => Just(json!(null))];
    let env = vec((select(VARIABLES), value()), 0..2).prop_map(|list| {
        let entry = |(name, value): (&str, Value)| json!({"name": name, "value": value});
        Value::Array(list.into_iter().map(entry).collect())
    });
    (name, limits, requests, env, any::<bool>(), 0..12_u8).prop_map(
        |(name, limits, requests, env, sidecar, odd)| match odd {
            0 => json!({"name": name, "resources": 1, "env": {}}),
            1 => json!({"name": name}),
            _ => {
                let mut container = json!({"name": name, "env": env});
                container["resources"] = json!({"limits": limits, "requests": requests});
                if sidecar {
                    container["restartPolicy"] = "Always".into();
                }
                container
            }
        },
    )
}

fn pod(dialect: Dialect) -> impl Strategy<Value = Value> {
    let (resources, annotations) = names(dialect);
    let containers = || vec(container(resources.clone()), 0..3);
    (containers(), containers(), object(annotations), select(SCHEDULERS), 0..12_u8).prop_map(
        |(containers, inits, annotations, scheduler, odd)| {
            let mut pod = json!({
                "metadata": {"annotations": annotations},
                "spec": {"containers": containers, "initContainers": inits,
                         "schedulerName": scheduler},
            });
            match odd {
                0 => pod["metadata"] = json!({}),
                1 => pod["spec"]["initContainers"] = json!("none"),
                2 => pod["spec"]["resourceClaims"] = json!([{"name": "gpu"}, {"name": "gpu-1"}]),
                3 => pod["spec"]["nodeName"] = json!("node-1"),
                _ => {}
            }
            pod
        },
    )
}

fn any_pod() -> impl Strategy<Value = (Dialect, Value)> {
    select(&Dialect::ALL[..]).prop_flat_map(|dialect| (Just(dialect), pod(dialect)))
}

#[test]
fn a_conversion_applies_and_can_be_computed_again() {
    let config = ProptestConfig { cases: 3_000, failure_persistence: None, ..Default::default() };
    let converted = Cell::new(0);
    let check = |(dialect, pod): (Dialect, Value)| {
        let converter = Converter::new(Settings::with_defaults(&[dialect])).unwrap();
        let labels = BTreeMap::new();
        let namespace = NamespaceView { name: "team-a", labels: &labels };
        if let Ok(Verdict::Convert(conversion)) = converter.convert(&pod, namespace) {
            converted.set(converted.get() + 1);
            let mut changed = pod.clone();
            json_patch::patch(&mut changed, &conversion.patch.0).expect("it applies");
            let again = converter.convert(&changed, namespace).expect("it is read");
            prop_assert_eq!(again, Verdict::Leave(LeaveReason::Converted));
            let template = converter.template(&changed).expect("it can be computed");
            prop_assert_eq!(template, conversion.template);
        }
        Ok(())
    };
    TestRunner::new(config).run(&any_pod(), check).unwrap();
    assert!(converted.get() > 300, "{} of 3000 are converted", converted.get());
}
