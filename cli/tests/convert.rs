//! Conversion of manifests.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tessera_cli::convert::{Conversions, ConvertResult, Converted, ManifestFile};
use tessera_dialect::{CONVERTED_ANNOTATION, Converter, Dialect, NamespaceView, Settings, Verdict};

fn directory() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn converted_by(settings: Settings, text: &str, paths: &[&str]) -> Converted {
    let converter = Converter::new(settings).unwrap();
    let template_paths: Vec<_> = paths.iter().map(|path| path.parse().unwrap()).collect();
    let conversions = Conversions {
        converter: &converter,
        namespace: "default",
        template_paths: &template_paths,
        add_tolerations: false,
    };
    let file = ManifestFile { name: "app.yaml".to_owned(), text: text.to_owned() };
    conversions.convert(&[file]).unwrap()
}

fn converted(text: &str) -> Converted {
    converted_by(Settings::with_defaults(&[Dialect::Hami]), text, &[])
}

fn documents(text: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(text).unwrap()
}

/// Returns the objects without the templates.
fn objects(converted: &Converted) -> Vec<Value> {
    let documents = documents(&converted.manifests);
    documents.into_iter().filter(|d| d["kind"] != "ResourceClaimTemplate").collect()
}

/// Compares with a file, which `UPDATE=1` writes.
fn check_golden(name: &str, text: &str) {
    let path = directory().join("tests/convert").join(name);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&path).unwrap(), "{name}: UPDATE=1 writes the file");
}

fn call(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_kubectl-tessera");
    let mut command = Command::new(program);
    command.args(arguments).current_dir(directory()).env_clear().stdin(Stdio::null());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn comments_and_order_of_a_file_are_kept() {
    let path = "tests/convert/app.yaml";
    let output = call(&["convert", "-f", path, "--settings", "tests/convert/settings.yaml"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    check_golden("app.converted.yaml", &text(&output.stdout));
    check_golden("app.report.txt", &text(&output.stderr));
    let input = std::fs::read_to_string(directory().join(path)).unwrap();
    let comments = input.lines().filter_map(|line| line.split_once('#')).map(|(_, text)| text);
    let gone = [" only these"];
    for comment in comments.filter(|comment| !gone.contains(comment)) {
        assert!(text(&output.stdout).contains(comment), "{comment}");
    }
}

/// Returns the example pods with their dialects, whose defaults convert or refuse them.
fn examples() -> Vec<(Dialect, PathBuf)> {
    let root = directory().join("../dialect/tests/examples");
    let mut examples = Vec::new();
    for dialect in Dialect::ALL {
        let pods = std::fs::read_dir(root.join(dialect.name())).unwrap();
        examples.extend(pods.map(|pod| (dialect, pod.unwrap().path())));
    }
    assert!(examples.len() > 120);
    examples
}

#[test]
fn a_manifest_becomes_what_the_webhook_makes_of_its_pod() {
    let (mut number, none) = (0, BTreeMap::new());
    for (dialect, path) in examples() {
        let input = std::fs::read_to_string(&path).unwrap();
        let settings = || Settings::with_defaults(&[dialect]);
        let result = converted_by(settings(), &input, &[]);
        let pod: Value = serde_saphyr::from_str(&input).unwrap();
        let namespace = NamespaceView { name: "default", labels: &none };
        let verdict = Converter::new(settings()).unwrap().convert(&pod, namespace);
        let report = &result.report.objects[0];
        let Ok(Verdict::Convert(conversion)) = verdict else {
            assert_eq!(report.errors.is_empty(), verdict.is_ok(), "{}", path.display());
            assert_eq!(result.manifests, input);
            continue;
        };
        number += 1;
        assert_eq!(report.result, ConvertResult::Converted, "{}", path.display());
        assert!(!report.warnings.iter().any(|w| w.contains("comments")), "{}", path.display());
        let mut expected = pod.clone();
        json_patch::patch(&mut expected, &conversion.patch.0).unwrap();
        let annotations = expected["metadata"]["annotations"].as_object_mut().unwrap();
        annotations.remove(CONVERTED_ANNOTATION);
        if annotations.is_empty() {
            expected["metadata"].as_object_mut().unwrap().remove("annotations");
        }
        let documents = documents(&result.manifests);
        if let Some(template) = conversion.template {
            let name = format!("{}-gpu", pod["metadata"]["name"].as_str().unwrap());
            expected["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] =
                name.clone().into();
            assert_eq!(documents[0]["spec"], template.spec);
            assert_eq!(documents[0]["metadata"]["name"], name);
        }
        assert_eq!(*documents.last().unwrap(), expected, "{}", path.display());
        let again = converted_by(settings(), &result.manifests, &[]);
        assert_eq!(again.manifests, result.manifests, "converted twice");
    }
    assert!(number > 70, "{number} converted");
}

/// Returns the object with a pod template of HAMi at the path.
fn object(version: &str, kind: &str, path: &[&str]) -> Value {
    let container = json!({"name": "main", "resources": {"limits": {"nvidia.com/gpu": 1}}});
    let mut value =
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [container]}});
    for field in path.iter().rev() {
        value = if *field == "0" { json!([value]) } else { json!({*field: value}) };
    }
    value["apiVersion"] = version.into();
    value["kind"] = kind.into();
    value["metadata"]["name"] = "a".into();
    value
}

#[test]
fn pod_templates_of_all_known_kinds_are_converted() {
    let kinds: &[(&str, &str, &str)] = &[
        ("v1", "Pod", ""),
        ("v1", "PodTemplate", "template"),
        ("v1", "ReplicationController", "spec.template"),
        ("apps/v1", "Deployment", "spec.template"),
        ("apps/v1", "StatefulSet", "spec.template"),
        ("apps/v1", "DaemonSet", "spec.template"),
        ("apps/v1", "ReplicaSet", "spec.template"),
        ("batch/v1", "Job", "spec.template"),
        ("batch/v1", "CronJob", "spec.jobTemplate.spec.template"),
        ("batch.volcano.sh/v1alpha1", "Job", "spec.tasks.0.template"),
        ("kubeflow.org/v1", "PyTorchJob", "spec.pytorchReplicaSpecs.Worker.template"),
        ("kubeflow.org/v1", "TFJob", "spec.tfReplicaSpecs.Worker.template"),
        ("kubeflow.org/v2beta1", "MPIJob", "spec.mpiReplicaSpecs.Launcher.template"),
        ("ray.io/v1", "RayCluster", "spec.workerGroupSpecs.0.template"),
        ("ray.io/v1", "RayCluster", "spec.headGroupSpec.template"),
        ("ray.io/v1", "RayJob", "spec.rayClusterSpec.headGroupSpec.template"),
        ("ray.io/v1", "RayService", "spec.rayClusterConfig.workerGroupSpecs.0.template"),
        (
            "leaderworkerset.x-k8s.io/v1",
            "LeaderWorkerSet",
            "spec.leaderWorkerTemplate.workerTemplate",
        ),
        ("jobset.x-k8s.io/v1alpha2", "JobSet", "spec.replicatedJobs.0.template.spec.template"),
        ("argoproj.io/v1alpha1", "Rollout", "spec.template"),
    ];
    for (version, kind, path) in kinds {
        let path: Vec<_> = path.split('.').filter(|field| !field.is_empty()).collect();
        let before = object(version, kind, &path);
        let yaml = serde_saphyr::to_string(&before).unwrap();
        let result = converted(&yaml);
        let after = &objects(&result)[0];
        let pod = path.iter().fold(after, |value, field| match field.parse::<usize>() {
            Ok(index) => &value[index],
            Err(_) => &value[*field],
        });
        let claims = &pod["spec"]["containers"][0]["resources"]["claims"];
        assert_eq!(*claims, json!([{"name": "gpu", "request": "main"}]), "{kind}");
        assert_eq!(pod["spec"]["resourceClaims"][0]["resourceClaimTemplateName"], "a-gpu");
        assert_eq!(result.report.objects[0].result, ConvertResult::Converted);
        let as_json = converted(&before.to_string());
        assert_eq!(objects(&as_json), objects(&result), "{kind} as JSON");
    }
}

#[test]
fn another_kind_needs_the_place_of_its_pod_templates() {
    let custom = object("example.com/v1", "Trainer", &["spec", "workers", "0", "pod"]);
    let yaml = serde_saphyr::to_string(&custom).unwrap();
    let unknown = converted(&yaml);
    let report = &unknown.report.objects[0];
    assert_eq!((report.result, unknown.manifests.as_str()), (ConvertResult::Unchanged, &*yaml));
    assert!(report.warnings[0].contains("--pod-template-path"), "{:?}", report.warnings);
    let settings = Settings::with_defaults(&[Dialect::Hami]);
    let known = converted_by(settings, &yaml, &["spec.workers.*.pod"]);
    assert_eq!(known.report.objects[0].result, ConvertResult::Converted);
}

#[test]
fn items_of_a_list_are_converted_in_place() {
    let items = [object("v1", "Pod", &[]), object("apps/v1", "Deployment", &["spec", "template"])];
    let list = json!({"apiVersion": "v1", "kind": "List", "items": items});
    let result = converted(&serde_saphyr::to_string(&list).unwrap());
    assert_eq!(result.report.objects.len(), 2);
    let list = &objects(&result)[0];
    let name = |pod: &Value| pod["spec"]["resourceClaims"][0]["resourceClaimTemplateName"].clone();
    assert_eq!(name(&list["items"][0]), "a-gpu");
    assert_eq!(name(&list["items"][1]["spec"]["template"]), "a-gpu", "equal claims");
    assert_eq!(documents(&result.manifests).len(), 2);
}

#[test]
fn names_of_templates_do_not_clash() {
    let mut other = object("v1", "Pod", &[]);
    other["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] = 3000.into();
    let own = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
        "metadata": {"name": "a-gpu"}, "spec": {"spec": {"devices": {"requests": []}}},
    });
    let mut elsewhere = other.clone();
    elsewhere["metadata"]["namespace"] = "team-b".into();
    let input = [&object("v1", "Pod", &[]), &own, &other, &elsewhere];
    let input: Vec<_> = input.iter().map(|object| object.to_string()).collect();
    let result = converted(&input.join("\n---\n"));
    let names: Vec<_> =
        result.report.objects.iter().flat_map(|object| object.templates.clone()).collect();
    assert_eq!(names, ["a-gpu-2", "a-gpu-3", "a-gpu"]);
}

#[test]
fn a_document_that_cannot_be_edited_is_written_anew() {
    let text = "\
# a comment
apiVersion: v1
kind: Pod
metadata: {name: twins}
spec:
  containers:
  - name: a
    resources: &share {limits: {nvidia.com/gpu: 1}}
  - name: b
    resources: *share
";
    let result = converted(text);
    let report = &result.report.objects[0];
    assert_eq!(report.result, ConvertResult::Converted);
    assert!(report.warnings.iter().any(|warning| warning.contains("comments")), "{report:?}");
    let pod = &objects(&result)[0];
    for (index, name) in ["a", "b"].into_iter().enumerate() {
        let claims = &pod["spec"]["containers"][index]["resources"]["claims"];
        assert_eq!(*claims, json!([{"name": "gpu", "request": name}]));
    }
}

#[test]
fn a_refused_object_leaves_no_output_and_exit_code_2() {
    let refused = "../dialect/tests/examples/hami/H8d.yaml";
    let fine = "../dialect/tests/examples/hami/H1.yaml";
    let convert = ["convert", "--dialect", "hami", "-f", fine, "-f", refused];
    let output = call(&convert);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""));
    assert!(text(&output.stderr).contains("nvidia.com/gpumem-percentage]: 101"));
    let check = call(&[&convert[..], &["--check"]].concat());
    assert_eq!(check.status.code(), Some(2));
    assert!(text(&check.stdout).contains("1 converted, 1 refused, 0 unchanged"));
    let json = call(&[&convert[..], &["--check", "-o", "json"]].concat());
    let report: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(
        report["objects"][0]["requests"][0],
        "main: 1 GPU, memory 3000Mi, cores 30, compute.policy Balance"
    );
    assert_eq!(report["objects"][1]["result"], "Refused");
    let good = call(&["convert", "--dialect", "hami", "-f", fine, "--check"]);
    assert_eq!(good.status.code(), Some(0));
}

#[test]
fn errors_of_the_command_line_say_what_to_do() {
    let fails = |arguments: &[&str], expected: &str| {
        let output = call(&[&["convert"], arguments].concat());
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(expected), "{error}");
    };
    let file = "tests/convert/app.yaml";
    fails(&["-f", file], "--dialect <NAME>");
    fails(&["-f", file, "--dialect", "hammy"], "expected one of hami, 4paradigm");
    fails(&["-f", file, "--dialect", "hami", "--dialect", "nvidia"], "both read `nvidia.com/gpu`");
    fails(&["-f", "tests/none.yaml", "--dialect", "hami"], "cannot read tests/none.yaml");
    fails(&["-f", "src", "--dialect", "hami"], "--recursive");
    fails(&["-f", "tests/convert.rs", "--dialect", "hami"], "document 1 is neither YAML nor JSON");
    fails(&["-f", file, "--settings", file], "cannot read the settings in tests/convert/app.yaml");
    fails(
        &["-f", file, "--dialect", "hami", "--pod-template-path", "spec..x"],
        "spec.tasks.*.template",
    );
}

#[test]
fn directories_are_read_by_name_of_their_files() {
    let hami = "../dialect/tests/examples/hami";
    let output = call(&["convert", "--dialect", "hami", "-f", hami, "--check"]);
    let report = text(&output.stdout);
    let (first, last) = (report.find("H1.yaml").unwrap(), report.find("H9.yaml").unwrap());
    assert!(first < last, "{report}");
    let recursive =
        call(&["convert", "--dialect", "hami", "-R", "-f", "../dialect/tests/examples", "--check"]);
    assert!(text(&recursive.stdout).len() > report.len());
}
