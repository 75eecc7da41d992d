//! The rules by which kube-apiserver sends pods to the webhook decide as the conversion does.
//!
//! The model of kube-apiserver here evaluates selectors and CEL expressions, and calls the webhook
//! once for each rule that matches, with the pod as the calls before have changed it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cel::{Context, Program, Value as CelValue};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde_json::{Value, json};
use tessera_dialect::{
    AdmissionRule, AdmissionTask, Converter, DIALECT_LABEL, Dialect, NamespaceView, Settings,
    Verdict,
};

type Labels = BTreeMap<String, String>;

/// Result of an admission: the pod as it is stored, or a refusal.
type Admitted = Result<Value, String>;

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn example_pods() -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/examples");
    let mut pods = Vec::new();
    for dialect in Dialect::ALL {
        for file in std::fs::read_dir(folder.join(dialect.name())).unwrap() {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
            let mut pod: Value = serde_saphyr::from_str(&text).unwrap();
            // kube-apiserver sets it before admission.
            if pod["spec"]["schedulerName"].is_null() {
                pod["spec"]["schedulerName"] = "default-scheduler".into();
            }
            pods.push(pod);
        }
    }
    assert!(pods.len() > 100);
    pods
}

/// One entry of the webhook configuration.
struct Entry {
    rule: AdmissionRule,
    conditions: Vec<Program>,
}

/// kube-apiserver and the webhook.
struct ApiServer {
    converter: Converter,
    entries: Vec<Entry>,
}

impl ApiServer {
    fn new(default: &[Dialect]) -> Self {
        let converter = Converter::new(Settings::with_defaults(default)).unwrap();
        let entry = |rule: AdmissionRule| {
            let compiled = rule.match_conditions.iter();
            let conditions = compiled.map(|c| Program::compile(&c.expression).unwrap()).collect();
            Entry { rule, conditions }
        };
        let entries = converter.admission_rules().into_iter().map(entry).collect();
        Self { converter, entries }
    }

    /// Returns the pod as it is stored, and the number of calls.
    fn admit(&self, pod: &Value, namespace: &str, of_namespace: &Labels) -> (Admitted, usize) {
        let mut pod = pod.clone();
        let mut of_namespace = of_namespace.clone();
        of_namespace.insert("kubernetes.io/metadata.name".to_owned(), namespace.to_owned());
        let mut calls = 0;
        for entry in &self.entries {
            if !entry.matches(&pod, &of_namespace) {
                continue;
            }
            calls += 1;
            match self.answer(entry.rule.task, &pod, namespace) {
                Err(refusal) => return (Err(refusal), calls),
                Ok(changed) => pod = changed,
            }
        }
        (Ok(pod), calls)
    }

    fn answer(&self, task: AdmissionTask, pod: &Value, namespace: &str) -> Admitted {
        assert_eq!(AdmissionTask::named(&task.to_string()), Some(task), "from the path");
        match task {
            AdmissionTask::RefuseLabel => {
                Err(self.converter.refused_label(pod, namespace).to_string())
            }
            AdmissionTask::Convert(dialect) => {
                stored(pod, self.converter.admit(pod, namespace, dialect))
            }
        }
    }
}

impl Entry {
    fn matches(&self, pod: &Value, of_namespace: &Labels) -> bool {
        let of_pod: Labels = match &pod["metadata"]["labels"] {
            Value::Null => Labels::new(),
            labels => serde_json::from_value(labels.clone()).unwrap(),
        };
        selects(&self.rule.namespace_selector, of_namespace)
            && selects(&self.rule.object_selector, &of_pod)
            && self.conditions.iter().all(|condition| {
                let mut context = Context::default();
                context.add_variable("object", pod.clone()).unwrap();
                condition.execute(&context).unwrap() == CelValue::Bool(true)
            })
    }
}

fn selects(selector: &LabelSelector, labels: &Labels) -> bool {
    assert_eq!(selector.match_labels, None, "not in this model");
    selector.match_expressions.iter().flatten().all(|requirement| {
        let value = labels.get(&requirement.key);
        let is_listed = || requirement.values.iter().flatten().any(|v| Some(v) == value);
        match requirement.operator.as_str() {
            "In" => is_listed(),
            "NotIn" => !is_listed(),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            other => panic!("{other}"),
        }
    })
}

fn stored<E: ToString>(pod: &Value, verdict: Result<Verdict, E>) -> Admitted {
    let mut pod = pod.clone();
    match verdict.map_err(|error| error.to_string())? {
        Verdict::Leave(_) => {}
        Verdict::Convert(conversion) => json_patch::patch(&mut pod, &conversion.patch.0).unwrap(),
    }
    Ok(pod)
}

/// Returns the labels that a pod or namespace may have.
fn choices() -> Vec<Labels> {
    let mut choices = vec![
        Labels::new(),
        labels(&[("hami.io/webhook", "ignore")]),
        labels(&[("vgpu-manager.io/ignore-webhook", "true"), (DIALECT_LABEL, "vgpu-manager")]),
        labels(&[("kai-resource-isolator.io/webhook", "ignore")]),
        labels(&[(DIALECT_LABEL, "none")]),
        labels(&[(DIALECT_LABEL, "hamii")]),
    ];
    let of_dialect = |dialect: &Dialect| labels(&[(DIALECT_LABEL, dialect.name())]);
    choices.extend([Dialect::Hami, Dialect::Kai, Dialect::Volcano].iter().map(of_dialect));
    choices
}

#[test]
fn rules_send_pods_as_the_conversion_decides() {
    let (mut converted, mut refused, mut left) = (0, 0, 0);
    let defaults: [&[Dialect]; 3] =
        [&[Dialect::Hami, Dialect::Kai], &[Dialect::Nvidia], &[Dialect::VgpuManager]];
    let pods = example_pods();
    for (number, default) in defaults.into_iter().enumerate() {
        let server = ApiServer::new(default);
        // Each pod with one of the defaults.
        let pods = pods.iter().skip(number).step_by(defaults.len());
        for (pod, of_namespace) in
            pods.flat_map(|pod| choices().into_iter().map(move |of_namespace| (pod, of_namespace)))
        {
            for own in choices().into_iter().take(6).filter(|own| own.len() < 2) {
                let mut pod = pod.clone();
                for (name, value) in &own {
                    pod["metadata"]["labels"][name] = value.as_str().into();
                }
                let view = NamespaceView { name: "team-a", labels: &of_namespace };
                let expected = stored(&pod, server.converter.convert(&pod, view));
                let (admitted, calls) = server.admit(&pod, "team-a", &of_namespace);
                match (&expected, &admitted) {
                    (Err(_), Err(_)) => refused += 1,
                    _ => assert_eq!(expected, admitted, "{of_namespace:?} {pod:#}"),
                }
                match expected {
                    Ok(ref stored) if *stored != pod => converted += 1,
                    Ok(_) => {
                        left += 1;
                        assert_eq!(
                            calls, 0,
                            "a pod is sent that stays as it is: {of_namespace:?} {pod:#}"
                        );
                    }
                    Err(_) => {}
                }
            }
        }
    }
    assert!(converted > 300 && refused > 500 && left > 500, "{converted} {refused} {left}");
}

#[test]
fn no_pod_of_kube_system_and_no_converted_pod_is_sent() {
    let server = ApiServer::new(&[Dialect::Hami]);
    let amounts = json!({"limits": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}});
    let pod = json!({
        "metadata": {"name": "worker"},
        "spec": {"schedulerName": "default-scheduler",
                 "containers": [{"name": "main", "resources": amounts}]},
    });
    let (admitted, calls) = server.admit(&pod, "kube-system", &Labels::new());
    assert_eq!((admitted, calls), (Ok(pod.clone()), 0));
    let (admitted, calls) = server.admit(&pod, "team-a", &Labels::new());
    let converted = admitted.unwrap();
    assert_eq!(calls, 1);
    assert_ne!(converted, pod);
    let (admitted, calls) = server.admit(&converted, "team-a", &Labels::new());
    assert_eq!((admitted, calls), (Ok(converted), 0));
}

#[test]
fn a_pod_of_two_default_dialects_is_refused_with_both() {
    let server = ApiServer::new(&[Dialect::Hami, Dialect::Gpushare]);
    let amounts = json!({"limits": {"nvidia.com/gpu": "1", "aliyun.com/gpu-mem": "3"}});
    let pod = json!({
        "metadata": {"name": "worker"},
        "spec": {"schedulerName": "default-scheduler",
                 "containers": [{"name": "main", "resources": amounts}]},
    });
    let (admitted, calls) = server.admit(&pod, "team-a", &Labels::new());
    assert_eq!(calls, 2, "the second one finds the name of the other dialect");
    let text = admitted.unwrap_err();
    assert!(text.contains("one of hami, and `aliyun.com/gpu-mem` is read by gpushare"), "{text}");
}

#[test]
fn names_of_rules_are_unique_and_fit_into_a_webhook_name() {
    let default = [Dialect::Hami, Dialect::Kai, Dialect::Volcano];
    let rules = Converter::new(Settings::with_defaults(&default)).unwrap().admission_rules();
    let names: BTreeSet<_> = rules.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(names.len(), rules.len());
    assert_eq!(rules.len(), 2 * Dialect::ALL.len() + default.len() + 2);
    for rule in &rules {
        assert!(rule.name.len() < 40, "{}", rule.name);
        assert!(rule.match_conditions.len() <= 64, "ValidatingWebhook's limit");
    }
}
