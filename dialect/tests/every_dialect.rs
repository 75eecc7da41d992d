//! Properties that the conversion has for every dialect.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};
use tessera_dialect::{
    CONVERTED_ANNOTATION, Conversion, ConversionError, Converter, DIALECT_LABEL, Dialect,
    LeaveReason, ManifestForm, NamespaceView, Settings, TEMPLATE_PREFIX, Template, Trigger,
    Verdict,
};

/// Returns amounts by which a container asks for one GPU, or a part of one.
fn amounts(dialect: Dialect) -> Value {
    match dialect {
        Dialect::Hami | Dialect::FourParadigm => {
            json!({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"})
        }
        Dialect::VgpuManager => json!({"nvidia.com/vgpu-number": "1"}),
        Dialect::Volcano => json!({"volcano.sh/vgpu-memory": "3000"}),
        Dialect::Kai => json!({}),
        Dialect::Nvidia | Dialect::Kubegpu => json!({"nvidia.com/gpu": "1"}),
        Dialect::Aws => json!({"k8s.amazonaws.com/vgpu": "1"}),
        Dialect::Elastic => json!({"elasticgpu.io/gpu-memory": "3000"}),
        Dialect::Gpushare => json!({"aliyun.com/gpu-mem": "3"}),
        Dialect::GpuManager => {
            json!({"tencent.com/vcuda-core": "20", "tencent.com/vcuda-memory": "4"})
        }
    }
}

/// Returns a pod that asks for a part of a GPU in container `main`, and not in container `log`.
fn pod(dialect: Dialect) -> Value {
    let plain = |value: Value| {
        let mut all = json!({"cpu": "1", "memory": "1Gi", "example.com/dongle": "1"});
        all.as_object_mut().unwrap().extend(value.as_object().unwrap().clone());
        all
    };
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "worker-", "labels": {"app": "worker"}},
        "spec": {
            "containers": [
                {"name": "main", "image": "cuda", "resources": {
                    "limits": plain(amounts(dialect)), "requests": plain(amounts(dialect)),
                }},
                {"name": "log", "image": "log", "resources": {"limits": {"cpu": "1"}}},
            ],
            "hostNetwork": true,
            "nodeSelector": {"gpu": "on"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        },
    });
    if dialect == Dialect::Kai {
        pod["metadata"]["annotations"] = json!({"gpu-fraction": "0.5"});
        pod["spec"]["schedulerName"] = "kai-scheduler".into();
    }
    pod
}

fn converter(default: &[Dialect]) -> Converter {
    Converter::new(Settings::with_defaults(default)).unwrap()
}

fn labels(labels: &[(&str, &str)]) -> BTreeMap<String, String> {
    labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn verdict(dialect: Dialect, pod: &Value) -> Result<Verdict, ConversionError> {
    let namespace = NamespaceView { name: "team-a", labels: &BTreeMap::new() };
    converter(&[dialect]).convert(pod, namespace)
}

fn conversion(dialect: Dialect, pod: &Value) -> Conversion {
    match verdict(dialect, pod) {
        Ok(Verdict::Convert(conversion)) => conversion,
        other => panic!("{dialect}: {other:?}"),
    }
}

fn patched(dialect: Dialect, pod: &Value) -> Value {
    let mut converted = pod.clone();
    json_patch::patch(&mut converted, &conversion(dialect, pod).patch.0).unwrap();
    converted
}

fn template_name(dialect: Dialect, pod: &Value) -> String {
    conversion(dialect, pod).template.unwrap().name
}

#[test]
fn only_the_dialects_names_leave_the_pod() {
    for dialect in Dialect::ALL {
        let before = pod(dialect);
        let template = template_name(dialect, &before);
        let mut expected = before.clone();
        let main = &mut expected["spec"]["containers"][0]["resources"];
        for field in ["limits", "requests"] {
            main[field] = json!({"cpu": "1", "memory": "1Gi", "example.com/dongle": "1"});
        }
        main["claims"] = json!([{"name": "gpu", "request": "main"}]);
        expected["spec"]["resourceClaims"] =
            json!([{"name": "gpu", "resourceClaimTemplateName": template}]);
        let mut converted = patched(dialect, &before);
        let annotations = converted["metadata"]["annotations"].as_object_mut().unwrap();
        assert!(annotations.remove(CONVERTED_ANNOTATION).is_some());
        assert!(annotations.is_empty(), "{dialect}: {annotations:?}");
        converted["metadata"].as_object_mut().unwrap().remove("annotations");
        expected["metadata"].as_object_mut().unwrap().remove("annotations");
        assert_eq!(converted, expected, "{dialect}");
    }
}

#[test]
fn a_pod_without_names_of_the_dialect_is_left() {
    for dialect in Dialect::ALL {
        let mut plain = pod(dialect);
        plain["spec"]["containers"].as_array_mut().unwrap().remove(0);
        plain["metadata"].as_object_mut().unwrap().remove("annotations");
        let left = verdict(dialect, &plain).unwrap();
        assert_eq!(left, Verdict::Leave(LeaveReason::NothingToConvert), "{dialect}");
    }
}

#[test]
fn amounts_of_zero_leave_without_a_claim() {
    for dialect in Dialect::ALL.into_iter().filter(|dialect| *dialect != Dialect::Kai) {
        let mut zero = pod(dialect);
        for field in ["limits", "requests"] {
            let amounts = zero["spec"]["containers"][0]["resources"][field].as_object_mut();
            for (_, amount) in amounts.unwrap().iter_mut().filter(|(name, _)| name.contains('/')) {
                *amount = "0".into();
            }
        }
        if dialect == Dialect::Volcano {
            // A memory of 0 is all memory there.
            zero["spec"]["containers"][0]["resources"] =
                json!({"limits": {"volcano.sh/vgpu-number": "0"}});
        }
        let conversion = conversion(dialect, &zero);
        assert_eq!(conversion.template, None, "{dialect}");
        let mut converted = zero.clone();
        json_patch::patch(&mut converted, &conversion.patch.0).unwrap();
        assert_eq!(converted["spec"]["resourceClaims"], Value::Null);
        assert_eq!(converter(&[dialect]).template(&converted).unwrap(), None);
    }
}

#[test]
fn claims_that_the_pod_has_stay() {
    for dialect in Dialect::ALL {
        let mut with_claims = pod(dialect);
        let other = json!({"name": "gpu", "resourceClaimName": "dongle"});
        with_claims["spec"]["resourceClaims"] = json!([other]);
        with_claims["spec"]["containers"][0]["resources"]["claims"] = json!([{"name": "gpu"}]);
        let converted = patched(dialect, &with_claims);
        let claims = converted["spec"]["resourceClaims"].as_array().unwrap();
        assert_eq!((claims.len(), &claims[0]), (2, &other), "{dialect}");
        assert_eq!(claims[1]["name"], "gpu-1");
        let of_main = &converted["spec"]["containers"][0]["resources"]["claims"];
        assert_eq!(*of_main, json!([{"name": "gpu"}, {"name": "gpu-1", "request": "main"}]));
    }
}

#[test]
fn a_copy_of_a_live_pod_is_left_or_refused() {
    for dialect in Dialect::ALL {
        let converted = patched(dialect, &pod(dialect));
        let left = verdict(dialect, &converted).unwrap();
        assert_eq!(left, Verdict::Leave(LeaveReason::Converted), "{dialect}");
        // As if a LimitRange added the resource once more.
        let mut again = pod(dialect);
        again["metadata"]["annotations"][CONVERTED_ANNOTATION] =
            converted["metadata"]["annotations"][CONVERTED_ANNOTATION].clone();
        let error = verdict(dialect, &again).unwrap_err().to_string();
        assert!(error.contains(CONVERTED_ANNOTATION), "{error}");
    }
}

#[test]
fn annotations_of_the_old_scheduler_are_dropped() {
    let written = [
        (Dialect::Hami, "hami.io/vgpu-devices-allocated"),
        (Dialect::FourParadigm, "4pd.io/vgpu-ids-new"),
        (Dialect::VgpuManager, "nvidia.com/real-allocated"),
        (Dialect::Volcano, "volcano.sh/gpu-index"),
        (Dialect::Kai, "runai/shared-gpu-configmap"),
        (Dialect::Elastic, "elasticgpu.io/assumed"),
        (Dialect::Gpushare, "ALIYUN_COM_GPU_MEM_IDX"),
        (Dialect::GpuManager, "tencent.com/gpu-assigned"),
    ];
    for (dialect, annotation) in written {
        let mut copied = pod(dialect);
        copied["metadata"]["annotations"][annotation] = "1".into();
        copied["metadata"]["annotations"]["example.com/kept"] = "1".into();
        let annotations = patched(dialect, &copied)["metadata"]["annotations"].clone();
        assert_eq!(annotations[annotation], Value::Null, "{dialect}");
        assert_eq!(annotations["example.com/kept"], "1");
    }
}

#[test]
fn names_of_two_dialects_in_a_pod_are_refused() {
    let pairs = [(Dialect::Hami, Dialect::Volcano), (Dialect::Aws, Dialect::Gpushare)];
    for (first, second) in pairs {
        let mut mixed = pod(first);
        mixed["spec"]["containers"][1]["resources"]["limits"] = amounts(second);
        let converter = converter(&[first, second]);
        let namespace = NamespaceView { name: "team-a", labels: &BTreeMap::new() };
        let error = converter.convert(&mixed, namespace).unwrap_err();
        assert!(matches!(error, ConversionError::TwoDialects { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(first.name()) && text.contains(second.name()), "{text}");
    }
}

#[test]
fn long_container_names_become_request_names() {
    let name = "m".repeat(63);
    for dialect in Dialect::ALL {
        let mut long = pod(dialect);
        long["spec"]["containers"][0]["name"] = name.as_str().into();
        let claims =
            patched(dialect, &long)["spec"]["containers"][0]["resources"]["claims"].clone();
        assert_eq!(claims[0]["request"], name.as_str(), "{dialect}");
    }
    let mut groups = pod(Dialect::Kubegpu);
    groups["spec"]["containers"][0]["name"] = name.as_str().into();
    groups["spec"]["containers"][0]["resources"] = json!({"limits": {"nvidia.com/gpu": 2}});
    let group = |group: u8| format!("resource/group/gpugrp1/0/gpugrp0/{group}/gpu/0/cards");
    let requests = json!({group(0): 1, group(1): 1});
    let info = json!({"runningcontainer": {&name: {"requests": requests}}});
    groups["metadata"]["annotations"] = json!({"KubeDevice/DeviceInfo": info.to_string()});
    let claims =
        &patched(Dialect::Kubegpu, &groups)["spec"]["containers"][0]["resources"]["claims"];
    let names = [&claims[0]["request"], &claims[1]["request"]].map(|name| name.as_str().unwrap());
    assert!(names[0] != names[1] && names.iter().all(|name| name.len() <= 63), "{names:?}");
}

#[test]
fn one_shape_has_one_template_name_everywhere() {
    let mut names = BTreeSet::new();
    for dialect in Dialect::ALL {
        let base = pod(dialect);
        let name = template_name(dialect, &base);
        assert!(name.starts_with(&format!("{TEMPLATE_PREFIX}{dialect}.")), "{name}");
        let mut other = base.clone();
        other["metadata"] =
            json!({"name": "other", "annotations": base["metadata"]["annotations"]});
        other["spec"]["containers"][0]["image"] = "another".into();
        other["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "7".into();
        assert_eq!(template_name(dialect, &other), name);
        other["spec"]["containers"][0]["name"] = "renamed".into();
        assert_ne!(template_name(dialect, &other), name, "the request has another name");
        assert!(names.insert(name));
    }
}

#[test]
fn mirror_pods_and_system_pods_are_left() {
    for dialect in Dialect::ALL {
        let mut mirror = pod(dialect);
        mirror["metadata"]["annotations"]["kubernetes.io/config.mirror"] = "1f0c".into();
        assert_eq!(verdict(dialect, &mirror).unwrap(), Verdict::Leave(LeaveReason::MirrorPod));
        let system = NamespaceView { name: "kube-system", labels: &BTreeMap::new() };
        let left = converter(&[dialect]).convert(&pod(dialect), system).unwrap();
        assert_eq!(left, Verdict::Leave(LeaveReason::SystemNamespace));
    }
}

#[test]
fn a_label_of_pod_or_namespace_selects_the_dialect() {
    for dialect in Dialect::ALL {
        let none = converter(&[]);
        let convert = |pod: &Value, labels: &BTreeMap<String, String>| {
            none.convert(pod, NamespaceView { name: "team-a", labels })
        };
        let selects = labels(&[(DIALECT_LABEL, dialect.name())]);
        let opts_out = labels(&[(DIALECT_LABEL, "none")]);
        let base = pod(dialect);
        let left = convert(&base, &BTreeMap::new()).unwrap();
        assert_eq!(left, Verdict::Leave(LeaveReason::NothingToConvert));
        assert!(matches!(convert(&base, &selects).unwrap(), Verdict::Convert(_)));
        let mut labelled = base.clone();
        labelled["metadata"]["labels"][DIALECT_LABEL] = "none".into();
        let left = convert(&labelled, &selects).unwrap();
        assert_eq!(left, Verdict::Leave(LeaveReason::OptedOut));
        labelled["metadata"]["labels"][DIALECT_LABEL] = dialect.name().into();
        assert!(matches!(convert(&labelled, &opts_out).unwrap(), Verdict::Convert(_)));
        let unknown = labels(&[(DIALECT_LABEL, "hammy")]);
        let error = convert(&base, &unknown).unwrap_err().to_string();
        assert!(error.contains("hammy") && error.contains("vgpu-manager"), "{error}");
    }
}

#[test]
fn more_than_32_requests_or_gpus_are_refused() {
    for dialect in Dialect::ALL {
        let mut many = pod(dialect);
        if dialect == Dialect::Kai {
            many["metadata"]["annotations"]["gpu-fraction-num-devices"] = "33".into();
        } else {
            let container =
                |i: u8| json!({"name": format!("c{i}"), "resources": {"limits": amounts(dialect)}});
            many["spec"]["containers"] = (0..33).map(container).collect();
        }
        let error = verdict(dialect, &many).unwrap_err().to_string();
        assert!(error.contains("32") && error.contains(dialect.name()), "{error}");
    }
}

#[test]
fn privileged_containers_are_refused_by_default() {
    for dialect in Dialect::ALL {
        let mut privileged = pod(dialect);
        privileged["spec"]["containers"][1]["securityContext"] = json!({"privileged": true});
        let error = verdict(dialect, &privileged).unwrap_err().to_string();
        assert!(error.starts_with("spec.containers[1].securityContext.privileged"), "{error}");
        let settings = json!({
            "default": [dialect], "dialects": {dialect.name(): {"privileged": "Warn"}},
        });
        let lenient = Converter::new(serde_json::from_value(settings).unwrap()).unwrap();
        let namespace = NamespaceView { name: "team-a", labels: &BTreeMap::new() };
        let Verdict::Convert(conversion) = lenient.convert(&privileged, namespace).unwrap() else {
            panic!("{dialect}: left")
        };
        assert_eq!(conversion.warnings.len(), 1, "{:?}", conversion.warnings);
    }
}

#[test]
fn bad_amounts_name_field_value_and_dialect() {
    for dialect in Dialect::ALL.into_iter().filter(|dialect| *dialect != Dialect::Kai) {
        let amounts = amounts(dialect);
        let name = amounts.as_object().unwrap().keys().next().unwrap();
        for bad in ["-1", "0.5", "1Ti", "many", ""] {
            let mut wrong = pod(dialect);
            for field in ["limits", "requests"] {
                wrong["spec"]["containers"][0]["resources"][field][name] = bad.into();
            }
            let error = verdict(dialect, &wrong).unwrap_err().to_string();
            let field = format!("spec.containers[0].resources.limits[{name}]: {bad}: expected");
            assert!(error.starts_with(&field), "{error}");
            assert!(error.contains(dialect.name()), "{error}");
        }
    }
}

#[test]
fn what_is_no_pod_is_an_error_with_the_field() {
    let namespace = NamespaceView { name: "team-a", labels: &BTreeMap::new() };
    let convert = |pod: Value| converter(&[Dialect::Hami]).convert(&pod, namespace);
    let error = convert(json!({"spec": {"containers": {}}})).unwrap_err().to_string();
    assert_eq!(error, "spec.containers: expected a list");
    let error = convert(json!({"spec": {"containers": [{"name": 1}]}})).unwrap_err().to_string();
    assert_eq!(error, "spec.containers[0].name: expected a name");
    let twins = json!({"spec": {"initContainers": [{"name": "a"}], "containers": [{"name": "a"}]}});
    let error = convert(twins).unwrap_err().to_string();
    assert_eq!(
        error,
        "spec.containers[0].name: expected a name that no other container of the pod has"
    );
    for odd in [json!(null), json!([]), json!("pod"), json!({"metadata": 1, "spec": [1]})] {
        assert_eq!(convert(odd).unwrap(), Verdict::Leave(LeaveReason::NothingToConvert));
    }
}

#[test]
fn settings_that_contradict_are_refused() {
    let check = |settings: Value| {
        let settings = serde_json::from_value::<Settings>(settings).map_err(|e| e.to_string())?;
        Converter::new(settings).map(drop).map_err(|error| error.to_string())
    };
    let refused = |settings: Value| check(settings).unwrap_err();
    let both = json!({"default": ["hami", "nvidia"], "dialects": {"hami": {}, "nvidia": {}}});
    assert!(refused(both).starts_with("default: hami and nvidia both read `nvidia.com/gpu`"));
    let disjoint =
        json!({"default": ["hami", "aws"], "dialects": {"hami": {}, "aws": {}, "nvidia": {}}});
    assert_eq!(check(disjoint), Ok(()));
    assert!(refused(json!({"default": ["aws"]})).contains("there is no entry dialects.aws"));
    let zero = json!({"dialects": {"aws": {"vgpus": 0}}});
    assert_eq!(refused(zero), "dialects.aws.vgpus: 0: expected a whole number of at least 1");
    for unknown in [
        json!({"dialects": {"hami": {"computePolicies": "Fixed"}}}),
        json!({"dialects": {"hammy": {}}}),
        json!({"defaults": []}),
        json!({"dialects": {"hami": {"computePolicy": "Hard"}}}),
        json!({"dialects": {"hami": {"unlimited": "Allow"}}}),
    ] {
        assert!(refused(unknown.clone()).contains("expected "), "{}", refused(unknown));
    }
    assert!(refused(json!({"deviceClass": "GPU"})).starts_with("deviceClass: GPU: a DNS"));
}

#[test]
fn resources_of_mig_devices_name_a_profile_and_are_not_shared() {
    let refusal = |resource: Value| {
        let settings = json!({"dialects": {"nvidia": {"resources": [resource]}}});
        let converter = Converter::new(serde_json::from_value(settings).unwrap());
        converter.err().map(|error| error.to_string()).unwrap_or_default()
    };
    let name = "nvidia.com/mig-1g.10gb";
    assert_eq!(refusal(json!({"name": name})), "");
    let shared = refusal(json!({"name": name, "replicas": 2}));
    assert!(shared.contains("resources[].replicas: 2: expected 1"), "{shared}");
    let part = json!({"name": "nvidia.com/mig-1c.3g.20gb"});
    let unknown = refusal(part.clone());
    assert!(unknown.contains("resources[].name: nvidia.com/mig-1c.3g.20gb: exp"), "{unknown}");
    let mut with_class = part;
    with_class["deviceClass"] = "small.gpu.tessera.dev".into();
    assert_eq!(refusal(with_class), "", "the class selects the devices");
}

#[test]
fn triggers_are_those_of_all_configured_dialects() {
    let triggers = converter(&[]).triggers();
    assert!(triggers.contains(&Trigger::Resource("nvidia.com/gpumem".to_owned())));
    assert!(triggers.contains(&Trigger::Annotation("gpu-fraction".to_owned())));
    assert!(!triggers.contains(&Trigger::Annotation("nvidia.com/use-gputype".to_owned())));
    let one = json!({"dialects": {"hami": {"resourceName": "example.com/gpu"}}});
    let one = Converter::new(serde_json::from_value(one).unwrap()).unwrap().triggers();
    assert!(one.contains(&Trigger::Resource("example.com/gpu".to_owned())));
    assert!(!one.contains(&Trigger::Resource("nvidia.com/gpu".to_owned())));
}

#[test]
fn a_template_is_not_computed_for_other_pods() {
    let converter = converter(&[Dialect::Hami]);
    let error = converter.template(&pod(Dialect::Hami)).unwrap_err();
    assert!(matches!(error, ConversionError::NotConverted), "{error}");
    let mut forged = pod(Dialect::Hami);
    forged["metadata"]["annotations"] = json!({CONVERTED_ANNOTATION: "{\"dialect\": \"hammy\"}"});
    let error = converter.template(&forged).unwrap_err();
    assert!(matches!(error, ConversionError::Original(_)), "{error}");
    // Another webhook inserted a container in front; names and not positions count.
    let mut injected = patched(Dialect::Hami, &pod(Dialect::Hami));
    let containers = injected["spec"]["containers"].as_array_mut().unwrap();
    containers.insert(0, json!({"name": "proxy", "securityContext": {"privileged": true}}));
    let template = converter.template(&injected).unwrap();
    assert_eq!(template, conversion(Dialect::Hami, &pod(Dialect::Hami)).template);
}

#[test]
fn a_manifest_keeps_nothing_and_names_its_own_template() {
    for dialect in Dialect::ALL {
        let before = pod(dialect);
        let content = conversion(dialect, &before).template.unwrap();
        let mut name = |template: &Template| {
            assert_eq!(*template, content, "the webhook's");
            "worker-gpu".to_owned()
        };
        let mut form = ManifestForm { template_name: &mut name, add_tolerations: true };
        let namespace = NamespaceView { name: "team-a", labels: &BTreeMap::new() };
        let verdict = converter(&[dialect]).convert_manifest(&before, namespace, &mut form);
        let Ok(Verdict::Convert(conversion)) = verdict else { panic!("{dialect}: {verdict:?}") };
        assert_eq!(conversion.template.as_ref().unwrap().spec, content.spec);
        let mut manifest = before.clone();
        json_patch::patch(&mut manifest, &conversion.patch.0).unwrap();
        assert_eq!(
            manifest["spec"]["resourceClaims"][0]["resourceClaimTemplateName"],
            "worker-gpu"
        );
        let annotations = manifest["metadata"]["annotations"].as_object();
        assert!(annotations.is_none_or(serde_json::Map::is_empty), "{dialect}");
        let tolerations = manifest["spec"]["tolerations"].as_array().unwrap();
        let keys: Vec<_> = tolerations.iter().map(|t| t["key"].as_str().unwrap()).collect();
        let unique: BTreeSet<_> = keys.iter().collect();
        assert_eq!(unique.len(), keys.len(), "{keys:?}");
        let names = amounts(dialect);
        assert!(names.as_object().unwrap().keys().all(|name| keys.contains(&name.as_str())));
    }
}

#[test]
fn settings_of_the_documentation_are_valid() {
    let page = include_str!("../../docs/user/convert.md");
    let mut blocks = page.split("```").skip(1).step_by(2);
    let block = blocks.find(|block| block.contains("deviceClass:")).unwrap();
    let settings: Settings = serde_saphyr::from_str(block).unwrap();
    Converter::new(settings).unwrap();
}

#[test]
fn very_many_containers_are_refused_with_few_steps() {
    let container =
        |name: String, dialect| json!({"name": name, "resources": {"limits": amounts(dialect)}});
    for dialect in [Dialect::Hami, Dialect::Gpushare, Dialect::Nvidia] {
        let mut many = pod(dialect);
        many["spec"]["containers"] =
            (0..5_000).map(|i| container(format!("c{i}"), dialect)).collect();
        many["spec"]["initContainers"] =
            (0..5_000).map(|i| container(format!("i{i}"), dialect)).collect();
        let error = verdict(dialect, &many).unwrap_err().to_string();
        assert!(error.contains("more than 32 with GPUs"), "{error}");
        many["spec"]["containers"].as_array_mut().unwrap().truncate(1);
        let converted = patched(dialect, &many);
        let last = &converted["spec"]["initContainers"][4_999]["resources"]["claims"];
        assert_eq!(*last, json!([{"name": "gpu", "request": "c0"}]), "{dialect}");
    }
    let mut groups = pod(Dialect::Kubegpu);
    let group = |i: u32| (format!("resource/group/gpugrp1/0/gpugrp0/{i}/gpu/0/cards"), json!(1));
    let requests: serde_json::Map<_, _> = (0..4_000).map(group).collect();
    let info = json!({"runningcontainer": {"main": {"requests": requests}}});
    groups["metadata"]["annotations"] = json!({"KubeDevice/DeviceInfo": info.to_string()});
    groups["spec"]["containers"][0]["resources"] = json!({"limits": {"nvidia.com/gpu": 4_000}});
    let error = verdict(Dialect::Kubegpu, &groups).unwrap_err().to_string();
    assert!(error.contains("more than 32"), "{error}");
}
