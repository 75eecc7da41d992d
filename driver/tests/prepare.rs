//! Prepare and Unprepare by a kubelet that calls over the real sockets.

mod fakes;

use std::{collections::BTreeMap, fs, path::Path, time::Duration};

use fakes::{
    container::{inject, mounts},
    gpus::{FakeGpus, uuid},
    kubelet::Kubelet,
    node::{Node, Share, asked, claim, configured, share_id, uid},
};
use oci_spec::runtime as oci;
use serde_json::json;
use tessera_api::slice::{CoresRatio, MemoryRatio};
use tessera_driver::{
    driver::{Driver, DriverSettings},
    intercept::{InterceptMode, ProxiedLibrary},
    kubelet::plugin::{ClaimHandler, ClaimRef},
};
use tessera_intercept_abi::{Grant, LEDGER_LEN, LedgerReport};
use tessera_proto::{dra_v1, dra_v1beta1, health_v1};

#[tokio::test]
async fn prepare_creates_files_and_unprepare_removes_them() {
    let node = Node::with_gpus(2);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(1, 10, 25)]);

    let devices = kubelet.prepare(claim.clone()).await.expect("prepared");

    let id = format!("{}-{}", uid("a"), share_id("a", 0));
    let expected = dra_v1::Device {
        request_names: vec!["gpu-0".into()],
        pool_name: "node-a".into(),
        device_name: uuid(1).device_name().to_string(),
        cdi_device_ids: vec![
            format!("k8s.gpu.tessera.dev/driver={}", uuid(1)),
            format!("k8s.gpu.tessera.dev/claim={id}"),
        ],
        share_id: Some(share_id("a", 0)),
    };
    assert_eq!(devices, [expected]);

    let container = inject(&node.path("cdi"), &devices);
    let mounts = mounts(&container);
    let source = |path: &str, read_only| {
        let (source, found) = &mounts[path];
        assert_eq!(*found, read_only, "{path}");
        source.clone()
    };
    let grant =
        Grant::parse(&fs::read(source(&format!("/dev/tessera/{id}/grant"), true)).expect("a file"))
            .expect("a grant");
    assert_eq!((grant.memory_limit_bytes, grant.cores_percent), (10 << 30, 25));
    assert_eq!(grant.gpu_uuid.to_string(), uuid(1).to_string());
    let ledger = fs::read(source(&format!("/dev/tessera/{id}/ledger"), false)).expect("a file");
    assert_eq!(LedgerReport::parse(&ledger).expect("a ledger").used_bytes(), 0);
    // The directory, since later instances replace the socket in it.
    assert_eq!(Path::new(&source("/dev/tessera/host", true)), node.path("state/host"));
    let library = source("/usr/local/lib/tessera/libtessera_intercept.so", true);
    assert_eq!(fs::read_to_string(library).expect("a file"), "the library");
    let preload = source("/etc/ld.so.preload", true);
    assert_eq!(
        fs::read_to_string(preload).expect("a file"),
        "/usr/local/lib/tessera/libtessera_intercept.so\n"
    );
    let environment = container
        .process()
        .as_ref()
        .and_then(|process| process.env().clone())
        .expect("an environment");
    assert!(environment.contains(&"NVIDIA_VISIBLE_DEVICES=void".to_owned()));
    let tmpfs: Vec<_> = node.claim_mounts().into_values().collect();
    assert_eq!(tmpfs.iter().map(|tmpfs| tmpfs.size_bytes).collect::<Vec<_>>(), [LEDGER_LEN as u64]);

    kubelet.unprepare(claim).await.expect("unprepared");
    assert!(node.traces().is_empty(), "{:#?}", node.traces());
    driver.stop().await;
}

/// Returns the file names of the mounted libraries of CUDA, NVML and the interceptor, by container
/// path.
fn libraries(container: &oci::Spec) -> BTreeMap<String, String> {
    let name = |source: &str| {
        Path::new(source).file_name().expect("a file").to_string_lossy().into_owned()
    };
    let is_library = |path: &&String| {
        path.contains("libcuda.so")
            || path.contains("tessera/lib")
            || path.contains("ld.so.preload")
    };
    let all = mounts(container);
    let found = all.keys().filter(is_library).cloned();
    found.map(|path| (path.clone(), name(&all[&path].0))).collect()
}

fn with_proxies(node: &Node, intercept: InterceptMode) -> DriverSettings {
    for library in ProxiedLibrary::ALL {
        fs::write(node.path(library.proxy()), library.soname()).expect("written");
    }
    DriverSettings { intercept, ..node.settings() }
}

#[tokio::test]
async fn interceptor_is_injected_as_configured() {
    let (usual, cuda) = ("/usr/lib64/libcuda.so.1", "/usr/local/lib/tessera/driver/libcuda.so.1");
    let (preload, library) =
        ("/etc/ld.so.preload", "/usr/local/lib/tessera/libtessera_intercept.so");
    let proxy = ProxiedLibrary::Cuda.proxy();
    let in_every_program =
        [(preload, "ld.so.preload"), (library, "libtessera_intercept.so"), (usual, "libcuda.so.1")];
    let in_its_place = [(cuda, "libcuda.so.1"), (usual, proxy)];
    let both = [
        (preload, "ld.so.preload"),
        (library, "libtessera_intercept.so"),
        (cuda, "libcuda.so.1"),
        (usual, proxy),
    ];
    for (intercept, expected) in [
        (InterceptMode::Preload, &in_every_program[..]),
        (InterceptMode::Proxy, &in_its_place),
        (InterceptMode::Both, &both),
    ] {
        let node = Node::with_gpus(1);
        let settings = with_proxies(&node, intercept);
        let driver = node.start_as(settings).await;
        let kubelet = Kubelet::register(&node.path("kubelet")).await;
        let devices = kubelet.prepare(node.allocate("a", &[(0, 1, 0)])).await.expect("prepared");
        let expected: BTreeMap<_, _> =
            expected.iter().map(|(path, file)| ((*path).to_owned(), (*file).to_owned())).collect();
        assert_eq!(libraries(&inject(&node.path("cdi"), &devices)), expected, "{intercept:?}");
        driver.stop().await;
    }
}

/// Containers of a claim with proxies may restart after the setting was changed.
#[tokio::test]
async fn changed_injection_keeps_prepared_claims() {
    let node = Node::with_gpus(1);
    let settings = with_proxies(&node, InterceptMode::Both);
    let driver = node.start_as(settings).await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let devices = kubelet.prepare(node.allocate("a", &[(0, 1, 0)])).await.expect("prepared");
    let before = libraries(&inject(&node.path("cdi"), &devices));
    driver.stop().await;
    fs::remove_dir_all(node.path("cdi")).expect("removed");

    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let new = kubelet.prepare(node.allocate("b", &[(0, 1, 0)])).await.expect("prepared");
    assert_eq!(libraries(&inject(&node.path("cdi"), &devices)), before);
    let new = libraries(&inject(&node.path("cdi"), &new));
    assert_eq!(new["/usr/lib64/libcuda.so.1"], "libcuda.so.1", "a new claim");
}

/// Returns the grants of a container with these devices.
fn grants(node: &Node, devices: &[dra_v1::Device]) -> Vec<Grant> {
    let mounts = mounts(&inject(&node.path("cdi"), devices));
    let sources =
        mounts.iter().filter(|(path, _)| path.ends_with("/grant")).map(|(_, (source, _))| source);
    sources
        .map(|source| Grant::parse(&fs::read(source).expect("a file")).expect("a grant"))
        .collect()
}

#[tokio::test]
async fn context_memory_is_that_of_prepare_time() {
    let node = Node::with_gpus(1);
    let settings =
        DriverSettings { context_memory: "512Mi".parse().expect("an amount"), ..node.settings() };
    let driver = node.start_as(settings).await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let devices =
        kubelet.prepare(node.allocate("a", &[(0, 1, 0), (0, 2, 0)])).await.expect("prepared");
    assert!(grants(&node, &devices).iter().all(|grant| grant.context_bytes == 512 << 20));
    driver.stop().await;
    for claim in fs::read_dir(node.paths().grants()).expect("grants") {
        fs::remove_dir_all(claim.expect("a claim").path()).expect("removed");
    }

    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let new = kubelet.prepare(node.allocate("b", &[(0, 1, 0)])).await.expect("prepared");
    assert_eq!(grants(&node, &new)[0].context_bytes, 0);
    let repaired = grants(&node, &devices);
    assert!(repaired.len() == 2 && repaired.iter().all(|grant| grant.context_bytes == 512 << 20));
}

/// Allocates a claim whose memory may be moved to the host.
fn oversubscribed(node: &Node, name: &str, shares: &[Share]) -> dra_v1::Claim {
    node.api.put_claim(configured(name, shares, &json!({"memory": {"oversubscribe": true}})));
    asked(name)
}

#[tokio::test]
async fn oversubscribed_claims_exceed_gpu_memory_alone() {
    let node = Node::with_gpus(1);
    let memory_ratio = MemoryRatio::from_percent(200).expect("a ratio");
    let settings = DriverSettings { memory_ratio, ..node.settings() };
    let driver = node.start_as(settings).await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;

    let devices =
        kubelet.prepare(oversubscribed(&node, "a", &[(0, 20, 0)])).await.expect("prepared");
    let granted = |devices: &[dra_v1::Device]| {
        let grant = grants(&node, devices)[0];
        (grant.memory_limit_bytes >> 30, grant.oversubscribe)
    };
    assert_eq!(granted(&devices), (20, true));
    let error =
        kubelet.prepare(node.allocate("b", &[(0, 17, 0)])).await.expect_err("more than 16 GiB");
    assert!(error.contains("of 16Gi used"), "{error}");
    let beside = kubelet
        .prepare(oversubscribed(&node, "c", &[(0, 12, 0)]))
        .await
        .expect("20 and 12 of 32 GiB");
    assert_eq!(granted(&beside), (12, true));
    let error = kubelet
        .prepare(oversubscribed(&node, "d", &[(0, 33, 0)]))
        .await
        .expect_err("more than twice 16 GiB");
    assert!(error.contains("of 32Gi used"), "{error}");
    driver.stop().await;
    for claim in fs::read_dir(node.paths().grants()).expect("grants") {
        fs::remove_dir_all(claim.expect("a claim").path()).expect("removed");
    }

    // The flag is removed: prepared claims do not change.
    let _driver = node.start().await;
    assert_eq!(granted(&devices), (20, true));
}

#[tokio::test]
async fn oversubscribed_cores_are_prepared_up_to_what_is_published() {
    let node = Node::with_gpus(1);
    let cores_ratio = CoresRatio::from_percent(200).expect("a ratio");
    let settings = DriverSettings { cores_ratio, ..node.settings() };
    let driver = node.start_as(settings).await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    for (name, cores) in [("a", 100), ("b", 80)] {
        kubelet.prepare(node.allocate(name, &[(0, 2, cores)])).await.expect("prepared");
    }
    let error = kubelet.prepare(node.allocate("c", &[(0, 2, 30)])).await.expect_err("too much");
    assert!(error.contains("30 of 200 percent requested, 180 percent used"), "{error}");
    for name in ["a", "b"] {
        kubelet.unprepare(asked(name)).await.expect("unprepared");
    }
    // An exclusive share reserves all that is published, and is held to one GPU.
    node.api.put_claim(configured("d", &[(0, 16, 200)], &json!({"exclusive": true})));
    let devices = kubelet.prepare(asked("d")).await.expect("prepared");
    assert_eq!(grants(&node, &devices)[0].cores_percent, 100);
    driver.stop().await;
}

#[tokio::test]
async fn container_gets_several_shares_of_several_gpus() {
    let node = Node::with_gpus(2);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let one =
        kubelet.prepare(node.allocate("one", &[(0, 4, 10), (0, 2, 10)])).await.expect("prepared");
    let two = kubelet.prepare(node.allocate("two", &[(1, 1, 0)])).await.expect("prepared");

    let all: Vec<_> = one.into_iter().chain(two).collect();
    let mounts = mounts(&inject(&node.path("cdi"), &all));
    let grants: Vec<u64> = mounts
        .iter()
        .filter(|(path, _)| path.ends_with("/grant"))
        .map(|(_, (source, _))| {
            Grant::parse(&fs::read(source).expect("a file")).expect("a grant").memory_limit_bytes
                >> 30
        })
        .collect();
    assert_eq!(grants.iter().sum::<u64>(), 7, "{mounts:#?}");
    assert_eq!(grants.len(), 3);
}

#[tokio::test]
async fn both_protocol_versions_repeat_the_same_answer() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    assert_eq!(
        kubelet.info.supported_versions,
        ["v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"]
    );
    let claim = node.allocate("a", &[(0, 1, 0)]);
    let first = kubelet.prepare(claim.clone()).await.expect("prepared");
    let before = node.traces();
    assert_eq!(kubelet.prepare(claim.clone()).await.expect("prepared"), first);

    let request = dra_v1beta1::NodePrepareResourcesRequest {
        claims: vec![dra_v1beta1::Claim {
            namespace: claim.namespace,
            uid: claim.uid.clone(),
            name: claim.name,
        }],
    };
    let mut client = dra_v1beta1::dra_plugin_client::DraPluginClient::new(kubelet.channel.clone());
    let answer = client.node_prepare_resources(request).await.expect("an answer").into_inner();
    assert_eq!(answer.claims[&claim.uid].devices[0].cdi_device_ids, first[0].cdi_device_ids);
    assert_eq!(node.traces(), before);
}

#[tokio::test]
async fn concurrent_prepares_of_claim_prepare_it_once() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(0, 9, 0)]);
    let (one, two) = tokio::join!(kubelet.prepare(claim.clone()), kubelet.prepare(claim));
    assert_eq!(one.expect("prepared"), two.expect("prepared"));
    assert_eq!(node.claim_mounts().len(), 1);
}

#[tokio::test]
async fn each_claim_of_a_call_has_its_own_answer() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let good = node.allocate("good", &[(0, 1, 0)]);
    let huge = node.allocate("huge", &[(0, 17, 0)]);
    let malformed = dra_v1::Claim { uid: "../../etc".into(), ..asked("malformed") };

    let answers = kubelet.prepare_all(vec![good, huge, asked("missing"), malformed]).await;

    assert!(answers[&uid("good")].is_ok());
    let error = |uid: &str| answers[uid].clone().expect_err("an error");
    assert!(error(&uid("huge")).contains("17Gi requested"), "{answers:#?}");
    assert!(
        error(&uid("missing")).contains("ResourceClaim ns/missing does not exist"),
        "{answers:#?}"
    );
    assert!(error("../../etc").contains("claim UID"), "{answers:#?}");
    assert_eq!(answers.len(), 4);
}

#[tokio::test]
async fn refused_claim_leaves_no_files_and_an_event() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let mut elsewhere = claim("a", &[(0, 1, 0)]);
    elsewhere["status"]["allocation"]["devices"]["results"][0]["pool"] = json!("node-b");
    node.api.put_claim(elsewhere);

    let error = kubelet.prepare(asked("a")).await.expect_err("refused");

    let reason = "results[0].pool: `node-b` is not the pool `node-a` of this node";
    assert!(error.contains(reason), "{error}");
    let event = node.api.wait_for("an event", |api| api.events().pop()).await;
    assert_eq!(event["reason"], "FailedPrepareDynamicResources");
    assert_eq!(event["regarding"]["name"], "pod-a");
    assert_eq!(event["regarding"]["uid"], "uid-of-pod-a");
    assert!(event["note"].as_str().expect("a note").contains(reason), "{event}");
    assert!(node.traces().is_empty(), "{:#?}", node.traces());
}

#[tokio::test]
async fn refused_claim_of_a_pod_group_has_an_event_of_its_own() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let mut elsewhere = claim("a", &[(0, 1, 0)]);
    elsewhere["status"]["allocation"]["devices"]["results"][0]["pool"] = json!("node-b");
    elsewhere["status"]["reservedFor"] = json!([{
        "apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "train", "uid": "g",
    }]);
    node.api.put_claim(elsewhere.clone());

    kubelet.prepare(asked("a")).await.expect_err("refused");

    let event = node.api.wait_for("an event", |api| api.events().pop()).await;
    assert_eq!(event["reason"], "FailedPrepareDynamicResources");
    assert_eq!(event["regarding"]["kind"], "ResourceClaim");
    assert_eq!(event["regarding"]["uid"], elsewhere["metadata"]["uid"]);
}

#[tokio::test]
async fn unsupported_parameters_are_refused() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    node.api.put_claim(configured("a", &[(0, 1, 50)], &json!({"sharing": "TimeSlicing"})));
    let error = kubelet.prepare(asked("a")).await.expect_err("refused");
    assert!(
        error.contains("sharing") && error.contains("not supported in this version"),
        "{error}"
    );
}

/// Starts a Prepare whose read of the claim is held, and cancels the call.
async fn cancelled(node: &Node, kubelet: &Kubelet, claim: &dra_v1::Claim) {
    node.api.hold_claim_reads();
    let reads = node.api.claim_reads();
    let mut client = kubelet.dra();
    let request = dra_v1::NodePrepareResourcesRequest { claims: vec![claim.clone()] };
    let call = tokio::spawn(async move { client.node_prepare_resources(request).await });
    node.api.wait_for("a read of the claim", |api| (api.claim_reads() > reads).then_some(())).await;
    call.abort();
    assert!(call.await.expect_err("cancelled").is_cancelled());
}

#[tokio::test]
async fn call_after_a_canceled_one_prepares() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(0, 1, 0)]);
    cancelled(&node, &kubelet, &claim).await;
    node.api.release_claim_reads();
    kubelet.prepare(claim).await.expect("prepared");
    assert_eq!(node.claim_mounts().len(), 1);
}

/// Waits until a Prepare of this driver has ended.
async fn until_prepare_ended(driver: &Driver) {
    let ended = r#"tessera_driver_claim_operations_total{operation="Prepare""#;
    let is_ended = |line: &str| line.starts_with(ended) && !line.ends_with(" 0");
    let ended = async {
        while !driver.metrics().render().lines().any(is_ended) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(300), ended).await.expect("the attempt ends");
}

#[tokio::test]
async fn canceled_prepare_ends_without_the_api_server() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(0, 1, 0)]);
    cancelled(&node, &kubelet, &claim).await;
    // The API server still holds the read.
    until_prepare_ended(&driver).await;
    let metrics = driver.metrics().render();
    assert!(metrics.contains("tessera_driver_prepare_retries_total 0"), "no timeout: {metrics}");
    node.api.release_claim_reads();
    assert!(node.claim_mounts().is_empty());
    kubelet.prepare(claim).await.expect("prepared at the next call");
}

/// The kubelet cancels the Prepare of a deleted pod and calls Unprepare, which may overtake it.
#[tokio::test]
async fn prepare_that_unprepare_overtook_leaves_nothing() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let claim = node.allocate("a", &[(0, 1, 0)]);
    let claims = driver.claims().clone();
    claims.unprepare(ClaimRef::from(claim.clone())).await.expect("unprepared");
    // The task of the call is spawned, and has not begun.
    let mut call = Box::pin(claims.prepare(ClaimRef::from(claim)));
    assert!(futures::poll!(&mut call).is_pending());
    drop(call);
    until_prepare_ended(&driver).await;
    assert!(node.traces().is_empty(), "{:#?}", node.traces());
    assert!(node.api.events().is_empty(), "no event for a deleted pod");
}

#[tokio::test]
async fn unprepare_ends_canceled_prepare_without_waiting() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(0, 1, 0)]);
    cancelled(&node, &kubelet, &claim).await;
    // The API server still holds the read.
    kubelet.unprepare(claim.clone()).await.expect("unprepared");
    node.api.release_claim_reads();
    until_prepare_ended(&driver).await;
    assert!(node.traces().is_empty(), "{:#?}", node.traces());
    assert_eq!(node.asked(), [""; 0]);

    kubelet.prepare(claim).await.expect("prepared at the next call");
}

#[tokio::test]
async fn unprepare_needs_neither_api_server_nor_gpu() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(0, 1, 0)]);
    kubelet.prepare(claim.clone()).await.expect("prepared");
    driver.stop().await;

    // Restarted without a GPU library, and the claim is deleted.
    node.api.remove_claim("ns", "a");
    node.api.fail_claim_reads(usize::MAX, 503);
    let node = Node { gpus: FakeGpus::default(), ..node };
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.unprepare(claim).await.expect("unprepared");
    assert!(node.traces().is_empty(), "{:#?}", node.traces());
}

#[tokio::test]
async fn unprepare_of_unknown_claim_succeeds() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.unprepare(asked("never")).await.expect("no error");
    kubelet
        .unprepare(dra_v1::Claim { uid: "../..".into(), ..asked("odd") })
        .await
        .expect("no error");
}

#[tokio::test]
async fn repeats_answer_and_restores_files_without_api_server() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(0, 1, 0)]);
    let first = kubelet.prepare(claim.clone()).await.expect("prepared");
    let before = node.traces();
    fs::remove_file(node.path(&format!("cdi/k8s.gpu.tessera.dev-claim_{}.json", uid("a"))))
        .expect("removed");
    fs::remove_file(node.path("cdi/k8s.gpu.tessera.dev-driver.json")).expect("removed");

    node.api.fail_claim_reads(usize::MAX, 503);
    assert_eq!(kubelet.prepare(claim).await.expect("answered"), first);
    assert_eq!(node.traces(), before);
    inject(&node.path("cdi"), &first);
}

#[tokio::test]
async fn lost_gpu_is_withdrawn_and_its_claim_stays() {
    let node = Node::with_gpus(2);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let claim = node.allocate("a", &[(1, 1, 0)]);
    let first = kubelet.prepare(claim.clone()).await.expect("prepared");
    let before = node.traces();
    let request = health_v1::NodeWatchResourcesRequest {};
    let mut health =
        kubelet.health().node_watch_resources(request).await.expect("a stream").into_inner();
    let healths = |message: health_v1::NodeWatchResourcesResponse| -> Vec<_> {
        message
            .devices
            .iter()
            .map(|device| (device.device.clone().expect("a device").device_name, device.health()))
            .collect()
    };
    let name = |number| uuid(number).device_name().to_string();
    let message = health.message().await.expect("a message").expect("the first");
    let healthy = health_v1::HealthStatus::Healthy;
    let all_healthy = [(name(0), healthy), (name(1), healthy)];
    assert_eq!(healths(message), all_healthy);

    node.gpus.lose(1);

    // An unchanged report is repeated.
    let changed = loop {
        let message = healths(health.message().await.expect("a message").expect("the next"));
        if message != all_healthy {
            break message;
        }
    };
    assert_eq!(changed, [(name(0), healthy), (name(1), health_v1::HealthStatus::Unhealthy)]);
    node.api
        .wait_for("a slice without the GPU", |api| {
            let devices =
                api.slices()[0]["spec"]["devices"].as_array().cloned().unwrap_or_default();
            (devices.len() == 1 && devices[0]["name"] == name(0)).then_some(())
        })
        .await;
    assert_eq!(node.traces(), before);
    assert_eq!(kubelet.prepare(claim.clone()).await.expect("still prepared"), first);
    let refused =
        kubelet.prepare(node.allocate("b", &[(1, 1, 0)])).await.expect_err("the GPU is gone");
    assert!(refused.contains("fallen off the bus"), "{refused}");
    inject(&node.path("cdi"), &first);
    kubelet.unprepare(claim).await.expect("unprepared");
}

#[tokio::test]
async fn foreign_cdi_spec_is_kept_and_fails_the_claim() {
    let node = Node::with_gpus(1);
    let _driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    let path = node.path(&format!("cdi/k8s.gpu.tessera.dev-claim_{}.json", uid("a")));
    fs::write(&path, r#"{"kind": "nvidia.com/gpu"}"#).expect("written");

    let claim = node.allocate("a", &[(0, 1, 0)]);
    let error = kubelet.prepare(claim).await.expect_err("refused");
    assert!(error.contains("not created by Tessera"), "{error}");
    assert_eq!(fs::read_to_string(&path).expect("still there"), r#"{"kind": "nvidia.com/gpu"}"#);
    assert_eq!(node.traces().len(), 1, "only that file: {:#?}", node.traces());
}

#[tokio::test]
async fn stopped_driver_removes_its_sockets_only() {
    let node = Node::with_gpus(1);
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    kubelet.prepare(node.allocate("a", &[(0, 1, 0)])).await.expect("prepared");
    let request = health_v1::NodeWatchResourcesRequest {};
    let _endless = kubelet.health().node_watch_resources(request).await.expect("a stream");
    let (before, slices, sockets) = (node.traces(), node.api.slices(), driver.sockets().clone());
    assert!(sockets.plugin.exists() && sockets.registration.exists());

    driver.stop().await;
    assert!(!sockets.plugin.exists() && !sockets.registration.exists());
    assert_eq!((node.traces(), node.api.slices()), (before, slices));
}
