//! Trials of the admission webhook: pods of other systems run unchanged, nothing is left of those
//! that are refused, and pods without their names do not depend on the webhook.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use kube::api::{
    DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams,
};
use kube::core::ApiResource;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::controller_deployment::ControllerDeployment;
use super::dialect_pods::{DialectPod, dialect_manifest, dialect_pods};
use super::test_bed::{TestBed, phase, wait_selected};
use crate::harness::TrialOutcome;
use crate::runner::{Figure, Outcome};
use crate::wait::CheckResult;

const LABEL: &str = "gpu.tessera.dev/dialect";
const CONFIGURATION: &str = "tessera-dialects";
/// Beginning of the names of the templates of converted pods.
const PREFIX: &str = "tessera.";
const DRY_RUN: PostParams = PostParams { dry_run: true, field_manager: None };
/// Time limit for the API server to notice a label or a configuration.
const NOTICE: Duration = Duration::from_secs(120);

/// Pods of each dialect, controllers of pods, and refusals.
pub(super) async fn run_unchanged(test_bed: TestBed) -> TrialOutcome {
    run_each(&test_bed).await?;
    read_old_environment(&test_bed).await?;
    select(&test_bed, "hami").await?;
    run_containers(&test_bed).await?;
    run_controllers(&test_bed).await?;
    leave_nothing(&test_bed).await?;
    refuse(&test_bed).await?;
    refuse_configs(&test_bed).await?;
    leave_alone(&test_bed).await?;
    Ok(Outcome::Passed(vec![]))
}

/// A pod of each dialect runs with its share, all at the same time.
async fn run_each(test_bed: &TestBed) -> anyhow::Result<()> {
    let name = |pod: &DialectPod| format!("pod-{}", pod.dialect);
    let pods = dialect_pods();
    for pod in &pods {
        let context = || format!("dialect {}", pod.dialect);
        select(test_bed, pod.dialect).await.with_context(context)?;
        test_bed.create(pod.manifest(&name(pod))?).await.with_context(context)?;
    }
    for pod in &pods {
        let context = || format!("dialect {}", pod.dialect);
        let running = test_bed.wait_running(&name(pod)).await.with_context(context)?;
        pod.check_share(test_bed, &running).await.with_context(context)?;
    }
    test_bed.delete(&pods.iter().map(name).collect::<Vec<_>>()).await
}

/// The webhook is killed amid creations, and absent.
pub(super) async fn lose_webhook(test_bed: TestBed) -> TrialOutcome {
    select(&test_bed, "hami").await?;
    let deployment = ControllerDeployment::new(&test_bed);
    let figures = kill_amid_creations(&test_bed, &deployment).await?;
    let replicas = deployment.replicas().await?.context("a Deployment")?;
    deployment.scale(2).await?;
    let replaced = replace_amid_creations(&test_bed, &deployment).await;
    deployment.scale(0).await?;
    let without = without_webhook(&test_bed).await;
    deployment.scale(replicas).await?;
    without?;
    replaced.context("two replicas")?;
    restore_entries(&test_bed).await?;
    Ok(Outcome::Passed(figures))
}

/// Returns a pod of HAMi with this amount of memory.
fn hami(name: &str, mib: u32) -> anyhow::Result<Value> {
    let mut manifest = dialect_manifest("hami", name)?;
    let limits = json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": mib});
    manifest["spec"]["containers"][0]["resources"]["limits"] = limits;
    Ok(manifest)
}

/// Selects the dialect of the namespace, and waits until the API server has noticed.
pub(super) async fn select(test_bed: &TestBed, dialect: &str) -> anyhow::Result<()> {
    label(test_bed, dialect.into()).await?;
    let prefix = format!("{PREFIX}{dialect}.");
    wait_converted(test_bed, &dialect_manifest(dialect, "probe")?, &prefix).await
}

/// Sets the label of the namespace that selects a dialect; null removes it.
pub(super) async fn label(test_bed: &TestBed, dialect: Value) -> anyhow::Result<()> {
    let namespaces: Api<Namespace> = Api::all(test_bed.client.clone());
    let label = json!({"metadata": {"labels": {LABEL: dialect}}});
    let parameters = PatchParams::default();
    namespaces.patch(test_bed.namespace(), &parameters, &Patch::Merge(label)).await?;
    Ok(())
}

/// Waits until a dry run of the creation of the pod names a template with this prefix.
async fn wait_converted(test_bed: &TestBed, pod: &Value, prefix: &str) -> anyhow::Result<()> {
    let is_converted = |pod: &Pod| template_of(pod).is_some_and(|name| name.starts_with(prefix));
    wait_created(test_bed, pod, &format!("converted into {prefix}"), is_converted).await
}

/// Waits until a dry run of the creation of the pod has the wanted result.
pub(super) async fn wait_created(
    test_bed: &TestBed,
    pod: &Value,
    what: &str,
    is_wanted: impl Fn(&Pod) -> bool,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + NOTICE;
    loop {
        let answer = test_bed.pods().create(&DRY_RUN, &serde_json::from_value(pod.clone())?).await;
        let seen = match answer {
            Ok(pod) if is_wanted(&pod) => return Ok(()),
            Ok(pod) => json!(pod.spec).to_string(),
            Err(error) => error.to_string(),
        };
        anyhow::ensure!(Instant::now() < deadline, "not {what}: {seen}");
        sleep(Duration::from_millis(100)).await;
    }
}

/// Returns the name of the template of the pod's first claim.
pub(super) fn template_of(pod: &Pod) -> Option<String> {
    let claims = pod.spec.as_ref()?.resource_claims.as_ref()?;
    claims.first()?.resource_claim_template_name.clone()
}

fn is_unconverted(pod: &Pod) -> bool {
    template_of(pod).is_none() || json!(pod.spec).to_string().contains("nvidia.com/")
}

/// Returns the names of the templates of converted pods in the namespace.
async fn templates(test_bed: &TestBed) -> anyhow::Result<BTreeSet<String>> {
    let templates: Api<ResourceClaimTemplate> =
        Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    let listed = templates.list(&ListParams::default()).await?;
    Ok(listed.iter().map(ResourceExt::name_any).filter(|name| name.starts_with(PREFIX)).collect())
}

/// Programs that read their part of the GPU from the old system's variables get that of their
/// share, which is all of the GPU that they see.
async fn read_old_environment(test_bed: &TestBed) -> anyhow::Result<()> {
    for (dialect, read, expected) in [
        (
            "gpushare",
            "$((100 * ALIYUN_COM_GPU_MEM_CONTAINER / ALIYUN_COM_GPU_MEM_DEV)) % of $ALIYUN_COM_GPU_MEM_POD",
            "100 % of 3",
        ),
        ("hami", "$CUDA_DEVICE_MEMORY_LIMIT_0", "3000m"),
    ] {
        select(test_bed, dialect).await?;
        let name = format!("reads-{dialect}");
        let mut pod = dialect_manifest(dialect, &name)?;
        let container = &mut pod["spec"]["containers"][0];
        container["image"] = "tessera/executables:e2e".into();
        container["command"] = json!(["bash", "-c", format!("echo \"{read}\"")]);
        test_bed.create(pod).await?;
        let lines = test_bed.output_of(&name).await?;
        anyhow::ensure!(lines == [expected], "{dialect}: {lines:?}");
        test_bed.delete(&[name]).await?;
    }
    Ok(())
}

/// Two containers, an init container and a sidecar: one claim, with a request for each.
async fn run_containers(test_bed: &TestBed) -> anyhow::Result<()> {
    let mut pod = hami("containers", 300)?;
    let container = |name: &str, command: Value, mib: u32| {
        let mut container = pod["spec"]["containers"][0].clone();
        container["name"] = name.into();
        container["command"] = command;
        container["resources"]["limits"]["nvidia.com/gpumem"] = mib.into();
        container
    };
    let hold = || json!(["tessera-probe", "hold", "--take", "64Mi"]);
    let mut sidecar = container("sidecar", hold(), 200);
    sidecar["restartPolicy"] = "Always".into();
    let prepare = container("prepare", json!(["tessera-probe", "--help"]), 100);
    let second = container("second", hold(), 400);
    pod["spec"]["initContainers"] = json!([prepare, sidecar]);
    pod["spec"]["containers"].as_array_mut().context("containers")?.push(second);
    test_bed.create(pod).await?;
    let running = test_bed.wait_running("containers").await?;
    let claim = test_bed.claim_of(&running).await?;
    let results = json!(claim.status)["allocation"]["devices"]["results"].clone();
    let share = |request: &str| {
        let results = results.as_array().into_iter().flatten();
        let mut of_request = results.filter(|result| result["request"] == request);
        of_request.next().map(|result| result["consumedCapacity"]["memory"].clone())
    };
    for (request, memory) in [("probe", "300Mi"), ("second", "400Mi"), ("sidecar", "200Mi")] {
        anyhow::ensure!(share(request) == Some(memory.into()), "{request}: {results}");
    }
    test_bed.delete(&["containers"]).await
}

/// Pods of a Deployment, a StatefulSet and a Job: one template for all of a shape.
async fn run_controllers(test_bed: &TestBed) -> anyhow::Result<()> {
    const PODS: usize = 104;
    let before = templates(test_bed).await?;
    let template = |mib: u32, command: Value, restart: &str| -> anyhow::Result<Value> {
        let mut spec = hami("template", mib)?["spec"].clone();
        spec["restartPolicy"] = restart.into();
        spec["containers"][0]["command"] = command;
        Ok(json!({"metadata": {"labels": {"app": "trial"}}, "spec": spec}))
    };
    let hold = || json!(["tessera-probe", "hold", "--take", "64Mi"]);
    let selector = json!({"matchLabels": {"app": "trial"}});
    let objects = [
        (
            "apps",
            "Deployment",
            json!({"replicas": PODS - 4, "selector": selector, "template": template(500, hold(), "Always")?}),
        ),
        (
            "apps",
            "StatefulSet",
            json!({"replicas": 2, "serviceName": "none", "podManagementPolicy": "Parallel", "selector": {"matchLabels": {"app": "trial"}}, "template": template(500, hold(), "Always")?}),
        ),
        (
            "batch",
            "Job",
            json!({"completions": 2, "parallelism": 2, "template": template(500, hold(), "Never")?}),
        ),
    ];
    for (group, kind, spec) in &objects {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
        let api: Api<DynamicObject> =
            Api::namespaced_with(test_bed.client.clone(), test_bed.namespace(), &resource);
        let object = DynamicObject::new("trial", &resource).data(json!({"spec": spec}));
        api.create(&PostParams::default(), &object).await.with_context(|| (*kind).to_owned())?;
    }
    let check = |pods: &[Pod]| {
        let running = pods.iter().filter(|pod| phase(pod) == "Running").count();
        if let Some(pod) = pods.iter().find(|pod| is_unconverted(pod)) {
            return CheckResult::Impossible(json!(pod).to_string());
        }
        CheckResult::done_if(running == PODS, || format!("{running} of {PODS} run"))
    };
    wait_selected(test_bed.pods(), Default::default(), "the pods to run", check).await?;
    let made = &templates(test_bed).await? - &before;
    anyhow::ensure!(made.len() == 1, "one template for {PODS} pods of one shape: {made:?}");
    for (group, kind, _) in &objects {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
        let api: Api<DynamicObject> =
            Api::namespaced_with(test_bed.client.clone(), test_bed.namespace(), &resource);
        api.delete("trial", &DeleteParams::background()).await?;
    }
    let gone = CheckResult::none_left;
    wait_selected(test_bed.pods(), Default::default(), "the pods to be deleted", gone).await
}

/// A dry run and a refusal after the conversion leave no template.
async fn leave_nothing(test_bed: &TestBed) -> anyhow::Result<()> {
    let before = templates(test_bed).await?;
    let dry = serde_json::from_value(hami("dry", 601)?)?;
    let converted = test_bed.pods().create(&DRY_RUN, &dry).await?;
    anyhow::ensure!(!is_unconverted(&converted), "{:?}", converted.spec);
    let dry = template_of(&converted).context("a template")?;
    let mut stored = BTreeSet::new();
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "ResourceQuota"));
    let quotas: Api<DynamicObject> =
        Api::namespaced_with(test_bed.client.clone(), test_bed.namespace(), &resource);
    let quota =
        DynamicObject::new("none", &resource).data(json!({"spec": {"hard": {"pods": "0"}}}));
    quotas.create(&PostParams::default(), &quota).await?;
    let deadline = Instant::now() + NOTICE;
    let mut mib = 610;
    loop {
        mib += 1;
        let name = format!("quota-{mib}");
        match test_bed.create(hami(&name, mib)?).await {
            Err(error) if error.to_string().contains("exceeded quota") => break,
            // The quota's controller has not computed it yet.
            Ok(pod) => {
                stored.extend(template_of(&pod));
                test_bed.delete(&[name]).await?;
            }
            Err(error) => return Err(error),
        }
        anyhow::ensure!(Instant::now() < deadline, "the quota refuses no pod");
    }
    quotas.delete("none", &DeleteParams::default()).await?;
    // A pod that is created afterwards gets its template, so those before have had time for theirs.
    stored.extend(template_of(&test_bed.create(hami("after", 602)?).await?));
    test_bed.wait_running("after").await?;
    let made = &templates(test_bed).await? - &before;
    anyhow::ensure!(!made.contains(&dry) && made.is_subset(&stored), "{made:?}, of {stored:?}");
    test_bed.delete(&["after"]).await
}

/// Refusals by the webhook and by the policies.
async fn refuse(test_bed: &TestBed) -> anyhow::Result<()> {
    let error_of = async |pod: Value| -> anyhow::Result<String> {
        match test_bed.create(pod).await {
            Err(error) => Ok(format!("{error:#}")),
            Ok(pod) => anyhow::bail!("it is created: {}", pod.name_any()),
        }
    };
    let mut bad = hami("bad", 300)?;
    bad["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem-percentage"] =
        101.into();
    let text = error_of(bad).await?;
    let parts = ["gpumem-percentage", "101", "from 0 to 100", "hami"];
    anyhow::ensure!(parts.iter().all(|part| text.contains(part)), "{text}");
    let mut unknown = hami("unknown", 300)?;
    unknown["metadata"]["labels"] = json!({LABEL: "hamii"});
    let text = error_of(unknown).await?;
    anyhow::ensure!(text.contains("hamii") && text.contains("vgpu-manager"), "{text}");
    let name = format!("{PREFIX}hami.00");
    let squat = test_bed.create_template(&name, "gpu.tessera.dev", Value::Null);
    let text = match squat.await {
        Err(error) => error.to_string(),
        Ok(()) => anyhow::bail!("a reserved name is squatted"),
    };
    anyhow::ensure!(text.contains("are those of converted pods"), "{text}");
    Ok(())
}

/// A wrong GpuConfig is refused when it is written, with the field.
async fn refuse_configs(test_bed: &TestBed) -> anyhow::Result<()> {
    let parameters = json!({
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig",
        "placement": {"device": "Packed"},
    });
    let config = json!([{"opaque": {"driver": "gpu.tessera.dev", "parameters": parameters}}]);
    let classes: Api<DeviceClass> = Api::all(test_bed.client.clone());
    let class = json!({"metadata": {"name": "trial.example.com"}, "spec": {"config": config}});
    let class = serde_json::from_value(class)?;
    let is_named = |text: &str| {
        ["config[0].opaque.parameters: placement.device", "Packed", "Spread"]
            .iter()
            .all(|part| text.contains(part))
    };
    let answer = classes.create(&DRY_RUN, &class).await;
    let text = answer.map_or_else(|error| error.to_string(), |_| "created".to_owned());
    anyhow::ensure!(is_named(&text), "{text}");
    let namespaces: Api<Namespace> = Api::all(test_bed.client.clone());
    let validated = json!({"metadata": {"labels": {"gpu.tessera.dev/validation": null}}});
    let (name, parameters) = (test_bed.namespace(), PatchParams::default());
    namespaces.patch(name, &parameters, &Patch::Merge(validated)).await?;
    let exactly = json!({"deviceClassName": "gpu.tessera.dev"});
    let requests = json!([{"name": "gpu", "exactly": exactly}]);
    let claim: ResourceClaim = serde_json::from_value(json!({
        "metadata": {"name": "wrong"},
        "spec": {"devices": {"requests": requests, "config": config}},
    }))?;
    let deadline = Instant::now() + NOTICE;
    loop {
        let answer = test_bed.claims().create(&DRY_RUN, &claim).await;
        let text = answer.map_or_else(|error| error.to_string(), |_| "created".to_owned());
        if is_named(&text) {
            return Ok(());
        }
        anyhow::ensure!(text == "created" && Instant::now() < deadline, "{text}");
        sleep(Duration::from_millis(100)).await;
    }
}

/// Pods that opt out stay as they are, and updates do not call the webhook.
async fn leave_alone(test_bed: &TestBed) -> anyhow::Result<()> {
    for (name, label, value) in [("none", LABEL, "none"), ("old", "hami.io/webhook", "ignore")] {
        let mut pod = hami(name, 300)?;
        pod["metadata"]["labels"] = json!({label: value});
        let created = test_bed.create(pod).await?;
        anyhow::ensure!(template_of(&created).is_none(), "{name} is converted");
    }
    let label = json!({"metadata": {"labels": {"later": "yes"}}});
    let parameters = PatchParams::default();
    let patched = test_bed.pods().patch("none", &parameters, &Patch::Merge(label)).await?;
    anyhow::ensure!(template_of(&patched).is_none(), "an update converts");
    test_bed.delete(&["none", "old"]).await
}

/// Creates pods while the only replica is killed: each is converted or refused.
async fn kill_amid_creations(
    test_bed: &TestBed,
    deployment: &ControllerDeployment,
) -> anyhow::Result<Vec<Figure>> {
    const PODS: usize = 200;
    let (mut refused, mut outage) = (0, Duration::ZERO);
    let (mut down_since, mut number) = (None, 0);
    let deadline = Instant::now() + NOTICE;
    // The kubelet may take longer to end the replica than the other pods to be created.
    while number < PODS || refused == 0 {
        anyhow::ensure!(Instant::now() < deadline, "the webhook was never away");
        number += 1;
        if number == PODS / 4 {
            let all = ListParams::default().labels("app.kubernetes.io/name=tessera-controller");
            deployment
                .pods
                .delete_collection(&DeleteParams::default().grace_period(0), &all)
                .await?;
        }
        // No node fits: the trial is about their creation.
        let mut pod = hami(&format!("pod-{number}"), 300)?;
        pod["spec"]["nodeSelector"] = json!({"trial": "none"});
        loop {
            match test_bed.create(pod.clone()).await {
                Ok(_) => break,
                Err(error) if format!("{error:#}").contains("failed calling webhook") => {
                    refused += 1;
                    let since = *down_since.get_or_insert_with(Instant::now);
                    outage = since.elapsed();
                    anyhow::ensure!(outage < NOTICE, "the webhook does not return: {error:#}");
                    sleep(Duration::from_millis(100)).await;
                }
                Err(error) => return Err(error),
            }
        }
    }
    let pods = test_bed.pods().list(&ListParams::default()).await?;
    anyhow::ensure!(pods.items.len() == number, "{} of {number} pods", pods.items.len());
    if let Some(pod) = pods.iter().find(|pod| is_unconverted(pod)) {
        anyhow::bail!("unconverted: {}", json!(pod));
    }
    // The leader that follows creates the template of all.
    let check = |templates: &[ResourceClaimTemplate]| {
        CheckResult::done_if(!templates.is_empty(), || "no template".into())
    };
    let templates: Api<ResourceClaimTemplate> =
        Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    wait_selected(templates, Default::default(), "the template", check).await?;
    delete_pods(test_bed).await?;
    let name = "only replica killed: pods of dialects refused".to_owned();
    Ok(vec![Figure { name, duration: outage }])
}

/// Two replicas are replaced, one after the other: no pod is refused or unconverted.
async fn replace_amid_creations(
    test_bed: &TestBed,
    deployment: &ControllerDeployment,
) -> anyhow::Result<()> {
    let reason = test_bed.namespace().to_owned();
    let mut replacement = std::pin::pin!(deployment.restart(&reason));
    let mut number = 0;
    loop {
        number += 1;
        let mut pod = hami(&format!("pod-{number}"), 300)?;
        pod["spec"]["nodeSelector"] = json!({"trial": "none"});
        tokio::select! {
            replaced = &mut replacement => {
                replaced?;
                break;
            }
            created = test_bed.create(pod) => {
                let created = created.with_context(|| format!("pod {number}"))?;
                anyhow::ensure!(!is_unconverted(&created), "unconverted: {}", json!(created));
            }
        }
        sleep(Duration::from_millis(20)).await;
    }
    anyhow::ensure!(number > 100, "only {number} pods meanwhile");
    delete_pods(test_bed).await
}

/// Deletes the pods of the namespace, none of which runs.
async fn delete_pods(test_bed: &TestBed) -> anyhow::Result<()> {
    test_bed
        .pods()
        .delete_collection(&DeleteParams::default().grace_period(0), &ListParams::default())
        .await?;
    let gone = CheckResult::none_left;
    wait_selected(test_bed.pods(), Default::default(), "the pods to be deleted", gone).await
}

/// Without a replica, only pods with handled names are refused.
async fn without_webhook(test_bed: &TestBed) -> anyhow::Result<()> {
    let plain = json!({
        "metadata": {"name": "plain"},
        "spec": {"nodeSelector": {"trial": "none"}, "containers": [{"name": "c", "image": "none"}]},
    });
    test_bed.create(plain).await.context("a pod without handled names")?;
    let answer = test_bed.create(hami("handled", 300)?).await;
    let text = answer.map_or_else(|error| format!("{error:#}"), |_| "created".to_owned());
    anyhow::ensure!(text.contains("failed calling webhook"), "{text}");
    let mut none = hami("none", 300)?;
    none["metadata"]["labels"] = json!({LABEL: "none"});
    none["spec"]["nodeSelector"] = json!({"trial": "none"});
    test_bed.create(none).await.context("a pod that opts out")?;
    test_bed.delete(&["plain", "none"]).await
}

/// The entries are deleted: the policy refuses what is not converted, until the leader has written
/// the entries again.
async fn restore_entries(test_bed: &TestBed) -> anyhow::Result<()> {
    let configurations: Api<MutatingWebhookConfiguration> = Api::all(test_bed.client.clone());
    let before = configurations.get(CONFIGURATION).await?.webhooks.unwrap_or_default();
    anyhow::ensure!(!before.is_empty(), "no entries");
    let pod: Pod = serde_json::from_value(hami("guarded", 300)?)?;
    let empty = json!({"webhooks": []});
    let deadline = Instant::now() + NOTICE;
    loop {
        configurations.patch(CONFIGURATION, &PatchParams::default(), &Patch::Merge(&empty)).await?;
        match test_bed.pods().create(&DRY_RUN, &pod).await {
            Err(error) if error.to_string().contains("was not converted") => break,
            // The API server has not noticed yet, or the leader was faster.
            Ok(pod) if !is_unconverted(&pod) => {}
            other => anyhow::bail!("neither converted nor refused: {other:?}"),
        }
        anyhow::ensure!(Instant::now() < deadline, "the policy refuses nothing");
        sleep(Duration::from_millis(50)).await;
    }
    wait_converted(test_bed, &json!(pod), PREFIX).await?;
    let after = configurations.get(CONFIGURATION).await?.webhooks.unwrap_or_default();
    anyhow::ensure!(after == before, "other entries: {after:?}");
    Ok(())
}
