//! Conformance of written specs with the ecosystem's CDI implementation.

use std::path::Path;

use container_device_interface::{
    cache::{Cache, CdiOption},
    spec::{parse_spec, read_spec, validate_spec},
    spec_dirs::with_spec_dirs,
    version::minimum_required_version,
};
use oci_spec::runtime as oci;
use tessera_cdi::{
    CdiDevice, CdiKind, ContainerEdits, DeviceNode, Hook, Mount, Spec, SpecFile, SpecStore, Version,
};

fn kind() -> CdiKind {
    CdiKind::new("k8s.gpu.example", "claim").expect("a kind")
}

fn device(name: &str, container_edits: ContainerEdits) -> CdiDevice {
    CdiDevice {
        name: name.parse().expect("a device name"),
        annotations: Default::default(),
        container_edits,
    }
}

fn env(entry: &str) -> ContainerEdits {
    ContainerEdits { env: vec![entry.to_owned()], ..Default::default() }
}

/// Returns a claim's spec as the driver writes it: a grant and a ledger per device, the library for
/// all.
fn claim_spec() -> Spec {
    let share = |name: &str| {
        let at = |file: &str| {
            (format!("/run/state/{name}/{file}"), format!("/dev/tessera/{name}/{file}"))
        };
        let (grant, grant_at) = at("grant");
        let (ledger, ledger_at) = at("ledger");
        let mounts = vec![
            Mount::bind_read_only(Path::new(&grant), Path::new(&grant_at)),
            Mount::bind(Path::new(&ledger), Path::new(&ledger_at)),
        ];
        device(name, ContainerEdits { mounts, ..env("NVIDIA_VISIBLE_DEVICES=void") })
    };
    let library =
        Mount::bind_read_only(Path::new("/run/state/lib.so"), Path::new("/usr/local/lib/lib.so"));
    let edits = ContainerEdits { mounts: vec![library], ..Default::default() };
    Spec::new(kind(), vec![share("0a-1"), share("0a-2")], edits)
}

/// Returns a spec with every field of the models.
fn full_spec() -> Spec {
    let null = DeviceNode {
        kind: Some("c".into()),
        major: Some(1),
        minor: Some(3),
        file_mode: Some(0o666),
        permissions: Some("rw".into()),
        uid: Some(1000),
        gid: Some(1000),
        ..DeviceNode::from_host(Path::new("/dev/nvidia0"), Path::new("/dev/null"))
    };
    let hook = Hook {
        hook_name: "createContainer".into(),
        path: "/usr/bin/hook".into(),
        args: vec!["hook".into(), "chmod".into()],
        env: vec!["A=b".into()],
        timeout: Some(3),
    };
    let scratch = Mount {
        kind: Some("tmpfs".into()),
        options: vec!["size=1".into()],
        ..Mount::bind(Path::new("/tmpfs"), Path::new("/x"))
    };
    let edits = ContainerEdits {
        env: vec!["X=y".into()],
        device_nodes: vec![null],
        hooks: vec![hook],
        mounts: vec![scratch],
        additional_gids: vec![7],
    };
    let mut spec = Spec::new(kind(), vec![device("d", edits)], env("Z="));
    spec.annotations.insert("who".into(), "me".into());
    spec.devices[0].annotations.insert("what".into(), "all of it".into());
    spec
}

fn cache_of(directory: &Path) -> Cache {
    let mut cache = Cache::default();
    let options: Vec<CdiOption> =
        vec![with_spec_dirs(&[directory.to_str().expect("a UTF-8 path")])];
    cache.configure(options);
    cache.refresh().expect("a directory without errors");
    cache
}

#[test]
fn written_specs_are_valid_and_read_back() {
    for spec in [claim_spec(), full_spec()] {
        let directory = tempfile::tempdir().expect("a directory");
        let store = SpecStore::new(directory.path());
        let file = SpecFile::for_id(kind(), "uid");
        store.write(&file, &spec).expect("a valid spec");

        let parsed = parse_spec(&store.path(&file)).expect("the oracle parses it");
        validate_spec(&parsed).expect("the oracle's schema accepts it");
        read_spec(&store.path(&file), 0)
            .expect("the oracle reads it")
            .validate()
            .expect("the oracle accepts its devices");
        assert_eq!(store.read(&file).expect("readable"), Some(spec));
    }
}

#[test]
fn declares_lowest_version_from_0_5_0() {
    let mut annotated = claim_spec();
    annotated.annotations.insert("a".into(), "b".into());
    let mut grouped = claim_spec();
    grouped.container_edits.additional_gids = vec![5];
    let plain = Spec::new(kind(), vec![device("gpu", env("A=b"))], ContainerEdits::default());
    let dotted = Spec::new(
        CdiKind::new("vendor", "class.with.dots").expect("a kind"),
        vec![device("gpu", env("A=b"))],
        ContainerEdits::default(),
    );

    for (spec, expected) in [
        (plain, Version::V0_5),
        (claim_spec(), Version::V0_5),
        (annotated, Version::V0_6),
        (dotted, Version::V0_6),
        (grouped, Version::V0_7),
        (full_spec(), Version::V0_7),
    ] {
        assert_eq!(spec.minimum_version(), expected);
        let json = serde_json::to_string(&spec).expect("JSON");
        let oracle = minimum_required_version(&serde_json::from_str(&json).expect("a spec there"))
            .expect("a version");
        let oracle: Version = oracle.to_string().parse().expect("a known version");
        assert_eq!(oracle.max(Version::V0_5), expected, "{json}");
    }
}

#[test]
fn injects_two_devices_of_a_claim() {
    let directory = tempfile::tempdir().expect("a directory");
    SpecStore::new(directory.path())
        .write(&SpecFile::for_id(kind(), "uid"), &claim_spec())
        .expect("a valid spec");
    let mut container = oci::Spec::default();

    let names = ["0a-1", "0a-2"]
        .map(|name| kind().device(name.parse().expect("a name")).to_string())
        .to_vec();
    cache_of(directory.path()).inject_devices(Some(&mut container), names).expect("injection");

    let mounts = container.mounts().clone().expect("mounts");
    let injected: Vec<_> = mounts
        .iter()
        .filter(|mount| {
            mount.source().as_ref().is_some_and(|source| source.starts_with("/run/state"))
        })
        .map(|mount| {
            let options = mount.options().clone().expect("options");
            assert!(options.contains(&"bind".to_owned()), "user namespaces need it: {mount:?}");
            (mount.destination().display().to_string(), options.contains(&"ro".to_owned()))
        })
        .collect();
    let expected = [
        ("/usr/local/lib/lib.so", true),
        ("/dev/tessera/0a-1/grant", true),
        ("/dev/tessera/0a-1/ledger", false),
        ("/dev/tessera/0a-2/grant", true),
        ("/dev/tessera/0a-2/ledger", false),
    ]
    .map(|(path, read_only)| (path.to_owned(), read_only));
    assert_eq!(injected, expected);
    let environment = container
        .process()
        .as_ref()
        .and_then(|process| process.env().clone())
        .expect("an environment");
    assert!(environment.contains(&"NVIDIA_VISIBLE_DEVICES=void".to_owned()));
}

#[test]
fn device_node_gets_numbers_of_host_node() {
    let directory = tempfile::tempdir().expect("a directory");
    let node = DeviceNode::from_host(Path::new("/dev/nvidia0"), Path::new("/dev/null"));
    let edits = ContainerEdits { device_nodes: vec![node], ..Default::default() };
    let spec = Spec::new(kind(), vec![device("GPU-1", edits)], ContainerEdits::default());
    SpecStore::new(directory.path())
        .write(&SpecFile::for_kind(kind()), &spec)
        .expect("a valid spec");

    let mut container = oci::Spec::default();
    let names = vec![format!("{}=GPU-1", kind())];
    cache_of(directory.path()).inject_devices(Some(&mut container), names).expect("injection");

    let devices =
        container.linux().as_ref().and_then(|linux| linux.devices().clone()).expect("devices");
    let node =
        devices.iter().find(|node| node.path() == Path::new("/dev/nvidia0")).expect("the node");
    assert_eq!((node.major(), node.minor()), (1, 3));
}
