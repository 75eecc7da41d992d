use proptest::prelude::*;

use super::*;

const UUID: &str = "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77";

#[test]
fn our_own_names_obey_their_rules() {
    assert_eq!(DriverName::ours(), DRIVER_NAME);
    assert_eq!(PoolName::of_node(&NodeName::new("node-a.example").unwrap()), "node-a.example");
}

#[test]
fn a_gpu_and_its_device_name_each_other() {
    let uuid = GpuUuid::new(UUID).unwrap();
    let device = uuid.device_name();
    assert_eq!(device, "gpu-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77");
    assert_eq!(GpuUuid::from_device_name(&device), Ok(uuid.clone()));
    assert_eq!(uuid.cdi_id(), format!("k8s.gpu.tessera.dev/driver={UUID}"));
}

#[test]
fn a_mig_device_and_its_device_name_each_other() {
    let gpu = GpuUuid::new(UUID).unwrap();
    for (profile, name) in [
        ("1g.10gb", "gpu-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77-mig-1g10gb-19-6"),
        ("1g.10gb+me", "gpu-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77-mig-1g10gb-me-19-6"),
        // Cut, so that the name has 63 bytes at most.
        ("7g.180gb+gfx.all", "gpu-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77-mig-7g180gb-gf-19-6"),
    ] {
        let device = MigDeviceName::new(gpu.clone(), profile, 19, 6);
        assert_eq!(device.device_name(), name);
        assert_eq!(MigDeviceName::of_device(&device.device_name()), Some(device.clone()));
        assert_eq!(GpuUuid::of_device(&device.device_name()), Some(gpu.clone()));
        assert!(GpuUuid::from_device_name(&device.device_name()).is_err(), "no whole GPU");
    }
    let longest = MigDeviceName::new(gpu.clone(), "7g.180gb+gfx.all", 999, 999);
    assert_eq!(longest.device_name().as_str().len(), 63);
    assert_eq!(MigDeviceName::of_device(&gpu.device_name()), None);
    assert_eq!(GpuUuid::of_device(&gpu.device_name()), Some(gpu));
    for wrong in ["gpu-0-mig-1g-19-0", "nic-0", "gpu-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77-mig-19-0"]
    {
        assert_eq!(MigDeviceName::of_device(&DeviceName::new(wrong).unwrap()), None, "{wrong}");
    }
}

#[test]
fn gpu_uuids_of_either_case_are_the_same_gpu() {
    assert_eq!(GpuUuid::new("GPU-1F0C2D3E-9A41-7C3B-8E55-0D6F2B1A4C77"), GpuUuid::new(UUID));
}

#[test]
fn what_is_no_gpu_is_refused() {
    for text in [
        "MIG-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77",
        "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77",
        "GPU-0",
        "GPU-",
    ] {
        assert!(matches!(GpuUuid::new(text), Err(NameError::Malformed { .. })), "{text}");
    }
    assert!(GpuUuid::from_device_name(&DeviceName::new("gpu-0").unwrap()).is_err());
    assert!(GpuUuid::from_device_name(&DeviceName::new("nic-0").unwrap()).is_err());
}

#[test]
fn an_error_names_the_text_and_the_rule() {
    assert_eq!(
        ShareId::new("1F0C2D3E-9a41-7c3b-8e55-0d6f2b1a4c77").unwrap_err().to_string(),
        "the share id `1F0C2D3E-9a41-7c3b-8e55-0d6f2b1a4c77` is malformed; it must be a UUID in lowercase, such as \
         `1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77`"
    );
    assert_eq!(
        Namespace::new("").unwrap_err().to_string(),
        "the namespace is empty; it must be a DNS label: lowercase letters, digits and `-`, beginning and ending with a \
         letter or digit"
    );
    assert_eq!(
        DeviceName::new("a".repeat(64)).unwrap_err().to_string(),
        format!("the device name `{}` has 64 bytes, and at most 63 are allowed", "a".repeat(64))
    );
}

#[test]
fn labels_and_subdomains_are_told_apart() {
    assert!(DeviceName::new("gpu.0").is_err());
    assert!(NodeName::new("node.example").is_ok());
    for bad in ["-node", "node-", "Node", "no_de", "a..b", ".a", "a.", "a.-b"] {
        assert!(NodeName::new(bad).is_err(), "{bad}");
    }
    assert!(PoolName::new("rack/node-a").is_ok());
    assert!(PoolName::new("rack//node-a").is_err());
}

#[test]
fn a_claim_uid_is_harmless_in_a_path() {
    for bad in ["..", "a/b", "/a", ".a", "a\0b", "a b", "a=b"] {
        assert!(ClaimUid::new(bad).is_err(), "{bad:?}");
    }
    assert!(ClaimUid::new("0b7f9f0a-6c52-4a8e-9d53-0a51f1a4c001").is_ok());
}

#[test]
fn an_allocation_result_is_named_by_its_share_or_its_index() {
    let claim = ClaimUid::new("uid-1").unwrap();
    let share = "1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77";
    let shared = ClaimDeviceName::of_result(&claim, 3, Some(share)).unwrap();
    assert_eq!(shared.to_string(), format!("uid-1-{share}"));
    assert_eq!(shared.cdi_id(), format!("k8s.gpu.tessera.dev/claim=uid-1-{share}"));
    assert_eq!(ClaimDeviceName::of_result(&claim, 3, None).unwrap().to_string(), "uid-1-3");
    assert!(ClaimDeviceName::of_result(&claim, 3, Some("../x")).is_err());
}

#[test]
fn a_subrequest_is_meant_where_its_request_is_named() {
    let sub = RequestName::new("gpu/big").unwrap();
    assert_eq!((sub.parent(), sub.subrequest()), ("gpu", Some("big")));
    assert!(sub.is_named_by("gpu") && sub.is_named_by("gpu/big") && !sub.is_named_by("gpu/small"));
    let whole = RequestName::new("gpu").unwrap();
    assert_eq!((whole.parent(), whole.subrequest()), ("gpu", None));
    assert!(whole.is_named_by("gpu") && !whole.is_named_by("gpu/big"));
    assert!(RequestName::new("a/b/c").is_err() && RequestName::new("a/").is_err());
}

#[test]
fn pci_addresses_take_the_form_of_sysfs() {
    assert_eq!(PciBusId::new("00000000:19:00.0").unwrap(), "0000:19:00.0");
    assert_eq!(PciBusId::new("0000:AF:1F.7").unwrap(), "0000:af:1f.7");
    assert_eq!(PciBusId::new("00010000:01:00.0").unwrap(), "10000:01:00.0");
    for bad in
        ["19:00.0", "0000:19:20.0", "0000:19:00.8", "0000:1:00.0", "0000:19:00", "0000:+9:00.0"]
    {
        assert!(PciBusId::new(bad).is_err(), "{bad}");
    }
}

#[test]
fn names_travel_through_json_and_are_checked_on_the_way_in() {
    let node: NodeName = serde_json::from_str("\"node-a\"").unwrap();
    assert_eq!(serde_json::to_string(&node).unwrap(), "\"node-a\"");
    let error = serde_json::from_str::<NodeName>("\"Node A\"").unwrap_err().to_string();
    assert!(error.starts_with("the node name `Node A` is malformed"), "{error}");
}

proptest! {
    #[test]
    fn a_gpu_survives_the_way_into_a_slice_and_back(
        text in "GPU-[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"
    ) {
        let uuid = GpuUuid::new(&text).expect("a GPU UUID");
        prop_assert!(uuid.as_str().eq_ignore_ascii_case(&text));
        prop_assert_eq!(GpuUuid::from_device_name(&uuid.device_name()), Ok(uuid));
    }

    #[test]
    fn a_pci_address_that_was_parsed_parses_again_to_itself(
        text in "(0000)?[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[01][0-9A-Fa-f]\\.[0-7]"
    ) {
        let pci = PciBusId::new(&text).expect("a PCI address");
        prop_assert_eq!(PciBusId::new(pci.as_str()), Ok(pci));
    }

    #[test]
    fn a_claim_device_name_never_leaves_its_directory(uid in "[a-c0-1./=_-]{1,8}") {
        if let Ok(uid) = ClaimUid::new(&uid) {
            let name = ClaimDeviceName::new(uid, ResultId::Index(0)).to_string();
            prop_assert!(!name.contains('/') && !name.starts_with('.') && !name.contains('='));
        }
    }
}
