//! Reviews per second by the admission webhook's function, beside reading and writing the same
//! review as JSON, in turn: `make bench-admission`. Pods of five dialects, as a Deployment's with
//! typical fields. A *shape* is a content of claims, for which there is a template.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark prints and panics")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tessera_admission::review::{ReviewResult, review};
use tessera_dialect::{AdmissionTask, Converter, Dialect, Settings};

const PODS: usize = 2_000;
const ROUNDS: usize = 7;

/// Returns the limits of a pod with this memory in MiB.
type Limits = fn(usize) -> Value;

const DIALECTS: [(Dialect, Limits); 5] = [
    (Dialect::Hami, |mib| json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": mib})),
    (
        Dialect::VgpuManager,
        |mib| json!({"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": mib, "nvidia.com/vgpu-cores": 30}),
    ),
    (Dialect::Volcano, |mib| json!({"volcano.sh/vgpu-memory": mib})),
    (
        Dialect::Elastic,
        |mib| json!({"elasticgpu.io/gpu-core": 20, "elasticgpu.io/gpu-memory": mib}),
    ),
    (Dialect::Gpushare, |mib| json!({"aliyun.com/gpu-mem": mib / 100})),
];

/// A review, and the task that it is for.
struct Sent {
    task: AdmissionTask,
    body: Vec<u8>,
}

/// Returns reviews of pods with this number of shapes.
fn reviews(shapes: usize) -> Vec<Sent> {
    let sent = |number: usize| {
        let shape = number % shapes;
        let (dialect, limits) = DIALECTS[shape % DIALECTS.len()];
        let body = body(number, limits(1_000 + shape)).to_string().into_bytes();
        Sent { task: AdmissionTask::Convert(dialect), body }
    };
    (0..PODS).map(sent).collect()
}

fn body(number: usize, limits: Value) -> Value {
    let variables: Vec<_> =
        (0..12).map(|i| json!({"name": format!("SETTING_{i}"), "value": "some value"})).collect();
    let mounts =
        json!([{"name": "data", "mountPath": "/data"}, {"name": "token", "mountPath": "/token"}]);
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "generateName": "worker-7d9f8c5b6d-", "namespace": "team-a",
            "labels": {"app": "worker", "pod-template-hash": "7d9f8c5b6d", "team": "a"},
            "ownerReferences": [{
                "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "worker-7d9f8c5b6d",
                "uid": "0bdc4a0c-0000-4000-8000-000000000000", "controller": true,
            }],
        },
        "spec": {
            "schedulerName": "default-scheduler", "serviceAccountName": "worker",
            "volumes": [{"name": "data", "emptyDir": {}}, {"name": "token", "emptyDir": {}}],
            "containers": [{
                "name": "main", "image": "registry.example.com/worker:1.2.3", "env": variables,
                "volumeMounts": mounts, "resources": {"limits": limits, "requests": limits},
            }],
        },
    });
    let kind = json!({"group": "", "version": "v1", "kind": "Pod"});
    let resource = json!({"group": "", "version": "v1", "resource": "pods"});
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": format!("705ab4f5-{number}"), "kind": kind, "resource": resource,
            "namespace": "team-a", "operation": "CREATE", "object": pod, "oldObject": null,
            "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller"},
            "dryRun": false, "options": null,
        },
    })
}

fn timed(run: impl FnOnce()) -> Duration {
    let begin = Instant::now();
    run();
    begin.elapsed()
}

/// Returns the median.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn main() {
    let dialects = DIALECTS.map(|(dialect, _)| dialect);
    let converter = Converter::new(Settings::with_defaults(&dialects)).unwrap();
    println!("{PODS} pods of {} dialects, median of {ROUNDS} rounds", DIALECTS.len());
    println!(
        "{:>8} {:>14} {:>14} {:>7} {:>14}",
        "shapes", "review, us", "JSON, us", "ratio", "per minute"
    );
    for shapes in [5, 1_000] {
        let reviews = reviews(shapes);
        let (mut own, mut plain) = (vec![], vec![]);
        for _ in 0..ROUNDS {
            own.push(timed(|| {
                for sent in &reviews {
                    let (answer, result) = review(&converter, sent.task, &sent.body).unwrap();
                    assert_eq!(result, ReviewResult::Converted);
                    black_box(answer);
                }
            }));
            plain.push(timed(|| {
                for sent in &reviews {
                    let value: Value = serde_json::from_slice(&sent.body).unwrap();
                    black_box(serde_json::to_vec(&value).unwrap());
                }
            }));
        }
        let [own, plain] =
            [own, plain].map(|times| median(times).as_secs_f64() * 1e6 / PODS as f64);
        let per_minute = 60e6 / own;
        println!("{shapes:>8} {own:>14.1} {plain:>14.1} {:>7.2} {per_minute:>14.0}", own / plain);
    }
}
