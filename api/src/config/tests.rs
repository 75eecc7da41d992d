use proptest::prelude::*;
use serde_json::{Value, json};

use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceClaimConfiguration, DeviceClassConfiguration,
    OpaqueDeviceConfiguration,
};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;

use super::*;
use crate::names::{DRIVER_NAME, RequestName};

/// A GpuConfig with these fields beside version and kind.
fn parameters(fields: Value) -> Value {
    let mut all = json!({"apiVersion": API_VERSION, "kind": KIND});
    let (Value::Object(all_fields), Value::Object(fields)) = (&mut all, fields) else {
        panic!("fields are an object")
    };
    all_fields.extend(fields);
    all
}

fn decoded(fields: Value) -> GpuConfig {
    GpuConfig::decode(&parameters(fields)).expect("a valid config")
}

fn refusal(fields: Value) -> String {
    GpuConfig::decode(&parameters(fields)).expect_err("an invalid config").to_string()
}

fn unsupported(fields: Value) -> Option<String> {
    decoded(fields).supported().err().map(|error| error.to_string())
}

fn opaque(driver: &str, parameters: Value) -> OpaqueDeviceConfiguration {
    OpaqueDeviceConfiguration { driver: driver.to_owned(), parameters: RawExtension(parameters) }
}

fn from(source: &str, requests: &[&str], fields: Value) -> DeviceAllocationConfiguration {
    DeviceAllocationConfiguration {
        source: source.to_owned(),
        requests: Some(requests.iter().map(|request| (*request).to_owned()).collect()),
        opaque: Some(opaque(DRIVER_NAME, parameters(fields))),
    }
}

fn request(name: &str) -> RequestName {
    RequestName::new(name).expect("a request name")
}

#[test]
fn every_field_is_read() {
    let config = decoded(json!({
        "placement": {"node": "Spread", "device": "Binpack"},
        "topology": [{"scope": "NVLink", "mode": "Require"}, {"scope": "NUMA", "mode": "Prefer"}],
        "exclusive": false,
        "memory": {"percent": 40.5, "limit": "8Gi", "oversubscribe": true},
        "compute": {"policy": "Balance", "priority": "Low", "limit": 60},
        "sharing": "MPS",
    }));
    assert_eq!(
        config,
        GpuConfig {
            placement: Placement {
                node: Some(PlacementPolicy::Spread),
                device: Some(PlacementPolicy::Binpack)
            },
            topology: Some(vec![
                TopologyTerm { scope: TopologyScope::NvLink, mode: TopologyMode::Require },
                TopologyTerm { scope: TopologyScope::Numa, mode: TopologyMode::Prefer },
            ]),
            exclusive: Some(false),
            memory: Memory {
                percent: MemoryPercent::from_hundredths(4_050),
                limit: Some(Quantity::from_mib(8192)),
                oversubscribe: Some(true),
            },
            compute: Compute {
                policy: Some(ComputePolicy::Balance),
                priority: Some(ComputePriority::Low),
                limit: Percent::new(60),
            },
            sharing: Some(Sharing::Mps),
        }
    );
}

#[test]
fn encoded_parameters_decode_to_the_same() {
    for fields in [
        json!({}),
        json!({"exclusive": true, "memory": {"limit": "3000Mi"}, "compute": {"limit": 7}}),
        json!({"placement": {"device": "Random"}, "topology": [], "sharing": "MPS"}),
        json!({"topology": [{"scope": "NUMA", "mode": "Prefer"}], "memory": {"oversubscribe": false}}),
        json!({"compute": {"policy": "None", "priority": "High"}}),
    ] {
        let config = decoded(fields.clone());
        assert_eq!(config.encode(), parameters(fields));
    }
    for hundredths in 1..=10_000 {
        let percent = MemoryPercent::from_hundredths(hundredths);
        let config =
            GpuConfig { memory: Memory { percent, ..Memory::default() }, ..GpuConfig::default() };
        assert_eq!(GpuConfig::decode(&config.encode()), Ok(config));
    }
}

#[test]
fn an_empty_config_and_nulls_set_nothing() {
    assert_eq!(decoded(json!({})), GpuConfig::default());
    assert_eq!(
        decoded(json!({"placement": null, "memory": {"percent": null}, "sharing": null})),
        GpuConfig::default()
    );
}

#[test]
fn an_unknown_field_is_named_with_the_fields_that_exist_there() {
    assert_eq!(
        refusal(json!({"memory": {"percentage": 40}})),
        "memory.percentage: unknown field; allowed here: percent, limit, oversubscribe"
    );
    assert_eq!(
        refusal(json!({"gpus": 2})),
        "gpus: unknown field; allowed here: apiVersion, kind, placement, topology, exclusive, memory, compute, sharing"
    );
    assert_eq!(
        refusal(json!({"topology": [{"scope": "NUMA", "mode": "Prefer", "weight": 1}]})),
        "topology[0].weight: unknown field; allowed here: scope, mode"
    );
}

#[test]
fn an_unknown_value_is_named_with_the_values_that_exist() {
    assert_eq!(
        refusal(json!({"placement": {"node": "binpack"}})),
        "placement.node: unknown value \"binpack\"; allowed: LeastFragmentation, Binpack, Spread, LeastLoaded, Random"
    );
    assert_eq!(
        refusal(
            json!({"topology": [{"scope": "NVLink", "mode": "Prefer"}, {"scope": "Rack", "mode": "Prefer"}]})
        ),
        "topology[1].scope: unknown value \"Rack\"; allowed: NVLink, PCIe, NUMA"
    );
    for percent in [json!(0), json!(100.01), json!(-1), json!(12.345), json!(1e300)] {
        let message = refusal(json!({"memory": {"percent": percent}}));
        assert!(message.ends_with("; allowed: 0.01 to 100, with up to two decimals"), "{message}");
    }
    for limit in ["0", "-1Gi", "1Ki", "8 GiB"] {
        let message = refusal(json!({"memory": {"limit": limit}}));
        assert!(message.starts_with("memory.limit: unknown value"), "{message}");
    }
}

#[test]
fn a_value_of_the_wrong_type_is_named_with_the_right_one() {
    assert_eq!(
        refusal(json!({"memory": {"percent": "40"}})),
        "memory.percent: \"40\" is not a number"
    );
    assert_eq!(
        refusal(json!({"memory": {"limit": 8}})),
        "memory.limit: 8 is not a string such as \"8Gi\""
    );
    assert_eq!(refusal(json!({"exclusive": 1})), "exclusive: 1 is not true or false");
    assert_eq!(
        refusal(json!({"memory": {"oversubscribe": "yes"}})),
        "memory.oversubscribe: \"yes\" is not true or false"
    );
    assert_eq!(refusal(json!({"placement": "Binpack"})), "placement: \"Binpack\" is not an object");
    assert_eq!(refusal(json!({"topology": {}})), "topology: {} is not a list");
    assert_eq!(refusal(json!({"sharing": 1})), "sharing: 1 is not a string");
    assert_eq!(
        GpuConfig::decode(&json!([])).expect_err("a list is no config").to_string(),
        "parameters: [] is not an object"
    );
}

#[test]
fn version_and_kind_must_be_ours() {
    let message = |value: Value| GpuConfig::decode(&value).expect_err("not ours").to_string();
    assert_eq!(
        message(json!({"kind": KIND})),
        "apiVersion: missing; it must be gpu.tessera.dev/v1alpha1"
    );
    assert_eq!(
        message(json!({"apiVersion": "gpu.nvidia.com/v1beta1", "kind": KIND})),
        "apiVersion: unknown value \"gpu.nvidia.com/v1beta1\"; allowed: gpu.tessera.dev/v1alpha1"
    );
    assert_eq!(
        message(json!({"apiVersion": API_VERSION, "kind": "MigConfig"})),
        "kind: unknown value \"MigConfig\"; allowed: GpuConfig"
    );
}

#[test]
fn half_a_topology_term_and_one_said_twice_are_refused() {
    assert_eq!(
        refusal(json!({"topology": [{"scope": "NUMA"}]})),
        "topology[0].mode: missing; it must be one of Prefer, Require"
    );
    assert_eq!(
        refusal(
            json!({"topology": [{"scope": "NUMA", "mode": "Prefer"}, {"scope": "NUMA", "mode": "Require"}]})
        ),
        "topology[1].scope: NUMA is listed twice; remove one"
    );
}

#[test]
fn what_is_not_enforced_yet_is_refused_with_those_words() {
    let cases = [(json!({"sharing": "TimeSlicing"}), "sharing: TimeSlicing")];
    for (fields, what) in cases {
        assert_eq!(unsupported(fields), Some(format!("{what} is not supported in this version")));
    }
}

#[test]
fn what_is_enforced_is_accepted() {
    for fields in [
        json!({}),
        json!({"placement": {"node": "Binpack", "device": "Spread"}}),
        json!({"placement": {"node": "Random", "device": "Random"}}),
        json!({"placement": {"node": "LeastFragmentation", "device": "LeastFragmentation"}}),
        json!({"topology": [{"scope": "PCIe", "mode": "Prefer"}, {"scope": "NVLink", "mode": "Require"}]}),
        json!({"memory": {"percent": 100, "oversubscribe": false}}),
        json!({"memory": {"percent": 50, "oversubscribe": true}}),
        json!({"compute": {"policy": "None", "priority": "Normal"}}),
        json!({"compute": {"policy": "Fixed", "priority": "High"}}),
        json!({"compute": {"policy": "Balance", "priority": "Low"}}),
        json!({"topology": [], "sharing": "Intercept"}),
    ] {
        assert_eq!(unsupported(fields), None);
    }
}

#[test]
fn a_request_without_configs_keeps_gpus_usable_and_is_not_capped() {
    let effective = effective_config(&[], &request("gpu")).expect("nothing is wrong");
    assert_eq!(effective, EffectiveConfig::default());
    assert_eq!(
        (effective.node, effective.device),
        (PlacementPolicy::LeastFragmentation, PlacementPolicy::LeastFragmentation)
    );
    assert_eq!((effective.compute, effective.sharing), (Compute::default(), Sharing::Intercept));
}

#[test]
fn claim_overrides_its_class_field_by_field_at_any_position() {
    let configs = [
        from("FromClaim", &[], json!({"placement": {"node": "Spread"}})),
        from(
            "FromClass",
            &[],
            json!({"placement": {"node": "Binpack", "device": "Spread"}, "memory": {"percent": 50}}),
        ),
        from("FromClaim", &["other"], json!({"memory": {"percent": 10}})),
        from("FromClaim", &["gpu"], json!({"memory": {"percent": 25}})),
    ];
    let effective = effective_config(&configs, &request("gpu/small")).expect("nothing is wrong");
    assert_eq!(effective.node, PlacementPolicy::Spread);
    assert_eq!(effective.device, PlacementPolicy::Spread);
    assert_eq!(effective.memory_percent, MemoryPercent::from_hundredths(2_500));
}

#[test]
fn a_class_lets_memory_spill_and_a_claim_may_decline() {
    let class = from("FromClass", &[], json!({"memory": {"oversubscribe": true}}));
    let claim = from("FromClaim", &[], json!({"memory": {"percent": 50}}));
    let decline = from("FromClaim", &[], json!({"memory": {"oversubscribe": false}}));
    let of = |configs: &[DeviceAllocationConfiguration]| {
        effective_config(configs, &request("gpu")).expect("nothing is wrong").oversubscribe
    };
    assert!(of(&[class.clone(), claim.clone()]) && !of(&[class, claim, decline]) && !of(&[]));
}

#[test]
fn values_that_mps_excludes_are_refused_across_class_and_claim() {
    let class = from("FromClass", &[], json!({"sharing": "MPS", "compute": {"policy": "Fixed"}}));
    let with = |fields: Value| {
        let configs = [class.clone(), from("FromClaim", &[], fields)];
        effective_config(&configs, &request("gpu")).map_err(|error| error.to_string())
    };
    for (fields, message) in [
        (
            json!({"compute": {"policy": "Balance"}}),
            "compute.policy: Balance cannot be combined with sharing: MPS; use Fixed or None",
        ),
        (
            json!({"compute": {"priority": "High"}}),
            "compute.priority: High cannot be combined with sharing: MPS; use Normal or Low",
        ),
        (
            json!({"memory": {"oversubscribe": true}}),
            "memory.oversubscribe: true cannot be combined with sharing: MPS; use false",
        ),
    ] {
        assert_eq!(with(fields), Err(message.to_owned()));
    }
    let low = with(json!({"compute": {"policy": "None", "priority": "Low"}}))
        .expect("MPS has a priority below normal");
    assert_eq!((low.sharing, low.compute_priority), (Sharing::Mps, ComputePriority::Low));
    let balanced = json!({"sharing": "Intercept", "compute": {"policy": "Balance"}});
    assert_eq!(with(balanced).map(|config| config.sharing), Ok(Sharing::Intercept));
}

#[test]
fn a_limit_needs_balance_and_cores_below_it() {
    let of = |fields: Value| {
        let configs = [from("FromClaim", &[], json!({"compute": fields}))];
        effective_config(&configs, &request("gpu"))
            .map(|config| config.compute)
            .map_err(|error| error.to_string())
    };
    assert_eq!(
        of(json!({"limit": 50, "policy": "Fixed"})),
        Err("compute.limit: 50% cannot be combined with compute.policy: Fixed; use compute.policy: Balance".to_owned())
    );
    assert!(of(json!({"limit": 50, "policy": "None"})).is_err());
    assert!(of(json!({"limit": 0})).is_err() && of(json!({"limit": "50"})).is_err());
    for fields in [json!({"limit": 50}), json!({"limit": 50, "policy": "Balance"})] {
        let compute = of(fields).expect("allowed");
        assert_eq!(compute.check_cores(20), Ok(()));
        assert_eq!(compute.check_cores(50), Ok(()));
        let message = |cores| compute.check_cores(cores).expect_err("refused").to_string();
        assert!(message(51).contains("compute.limit") && message(51).contains("51 to 100"));
        assert!(message(0).contains("capacity.requests.cores"), "{}", message(0));
    }
    assert_eq!(Compute::default().check_cores(0), Ok(()));
}

#[test]
fn class_and_claim_before_the_allocation_come_to_the_same() {
    let class = [DeviceClassConfiguration {
        opaque: Some(opaque(DRIVER_NAME, parameters(json!({"placement": {"device": "Spread"}})))),
    }];
    let claim = [DeviceClaimConfiguration {
        requests: None,
        opaque: Some(opaque(DRIVER_NAME, parameters(json!({"memory": {"percent": 25}})))),
    }];
    let before =
        effective_config_of_request(&class, &claim, &request("gpu")).expect("nothing is wrong");
    let allocated = [
        from("FromClass", &["gpu"], json!({"placement": {"device": "Spread"}})),
        from("FromClaim", &[], json!({"memory": {"percent": 25}})),
    ];
    assert_eq!(Ok(before), effective_config(&allocated, &request("gpu")));
}

#[test]
fn configs_of_other_drivers_are_left_alone() {
    let foreign = DeviceAllocationConfiguration {
        source: "FromClaim".to_owned(),
        requests: None,
        opaque: Some(opaque(
            "gpu.nvidia.com",
            json!({"kind": "GpuConfig", "whatever": ["they", "like"]}),
        )),
    };
    assert_eq!(effective_config(&[foreign], &request("gpu")), Ok(EffectiveConfig::default()));
}

#[test]
fn an_error_says_whose_config_it_is() {
    let configs = [
        from("FromClass", &[], json!({})),
        from("FromClaim", &[], json!({"memory": {"percent": 0}})),
    ];
    assert_eq!(
        effective_config(&configs, &request("gpu")).expect_err("0 percent").to_string(),
        "ResourceClaim config[1]: memory.percent: unknown value 0; allowed: 0.01 to 100, with up to two decimals"
    );
    let class = [
        from("FromClass", &[], json!({"sharing": "TimeSlicing"})),
        from("FromClaim", &[], json!({"sharing": "Intercept"})),
    ];
    assert_eq!(
        effective_config(&class, &request("gpu")).expect_err("TimeSlicing").to_string(),
        "DeviceClass config[0]: sharing: TimeSlicing is not supported in this version"
    );
    let odd = [DeviceAllocationConfiguration {
        source: "FromNode".to_owned(),
        ..DeviceAllocationConfiguration::default()
    }];
    assert_eq!(
        effective_config(&odd, &request("gpu")).expect_err("no such source").to_string(),
        "config[0].source: unknown value FromNode; allowed: FromClass, FromClaim"
    );
}

#[test]
fn a_long_value_is_not_repeated_in_full() {
    let message = refusal(json!({"sharing": "é".repeat(5000)}));
    assert!(message.len() < 300, "{}", message.len());
}

#[test]
fn a_hundred_shares_of_one_percent_fit_together() {
    let one = MemoryPercent::from_hundredths(100).expect("1 is a percentage");
    let all = MemoryPercent::from_hundredths(10_000).expect("100 is a percentage");
    assert_eq!((one.of_mib(81559), all.of_mib(81559)), (815, 81559));
    assert_eq!(one.of_mib(3), 1, "the smallest share is 1 MiB");
}

/// JSON that is often nearly a config.
fn almost_config() -> impl Strategy<Value = Value> {
    let words = [
        "apiVersion",
        "kind",
        "placement",
        "node",
        "device",
        "memory",
        "percent",
        "topology",
        "scope",
        "mode",
        "x",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        prop::sample::select(vec!["Binpack", "NUMA", "Prefer", KIND, API_VERSION, ""])
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::btree_map(prop::sample::select(words.to_vec()), inner, 0..5)
                .prop_map(|fields| fields
                    .into_iter()
                    .map(|(name, value)| (name.to_owned(), value))
                    .collect::<Value>()),
        ]
    })
}

proptest! {
    #[test]
    fn any_json_is_decoded_or_refused_with_a_field(value in almost_config()) {
        if let Err(error) = GpuConfig::decode(&value) {
            prop_assert!(!error.path().is_empty());
        }
    }
}

#[test]
fn memory_percent_has_two_exact_decimals() {
    let of = |number: serde_json::Value| {
        let config = decoded(json!({"memory": {"percent": number}}));
        config.memory.percent.expect("a percentage").to_string()
    };
    for (number, shown) in [
        (json!(33.33), "33.33%"),
        (json!(0.01), "0.01%"),
        (json!(0.29), "0.29%"),
        (json!(12.5), "12.5%"),
        (json!(100.0), "100%"),
        (json!(7), "7%"),
    ] {
        assert_eq!(of(number), shown);
    }
    let third = MemoryPercent::from_hundredths(3_333).expect("valid");
    assert_eq!((third.of_mib(81_559), third.of_mib(1)), (27_183, 1));
    for text in ["", ".5", "5.", "+5", "1e1", "0", "0.001", "٣"] {
        assert!(text.parse::<MemoryPercent>().is_err(), "{text}");
    }
}

#[test]
fn exclusive_excludes_amounts_and_percent() {
    let exclusive = decoded(json!({"exclusive": true, "memory": {"limit": "3000Mi"}}));
    assert_eq!(exclusive.check_request(RequestedCapacity::default()), Ok(()));
    let amounts = [
        (Some(Quantity::from_mib(1)), None, "capacity.requests.memory"),
        (None, Some(Quantity::from_integer(0)), "capacity.requests.cores"),
    ];
    for (memory, cores, named) in amounts {
        let error = exclusive.check_request(RequestedCapacity { memory, cores }).expect_err(named);
        assert!(error.to_string().contains(named), "{error}");
    }
    let percent = decoded(json!({"exclusive": true, "memory": {"percent": 50}}));
    let error = percent.consistent().expect_err("two amounts");
    assert!(error.to_string().starts_with("memory.percent: 50%"), "{error}");
    assert_eq!(exclusive.needs_controller().map(|(field, _)| field), Some("exclusive"));
}

#[test]
fn memory_limit_is_at_most_the_amount() {
    let config = decoded(json!({"memory": {"limit": "8Gi"}}));
    let amount = |mib| RequestedCapacity { memory: Some(Quantity::from_mib(mib)), cores: None };
    assert_eq!(config.check_request(amount(8192)), Ok(()));
    assert_eq!(config.check_request(RequestedCapacity::default()), Ok(()));
    let error = config.check_request(amount(8191)).expect_err("more than is reserved");
    assert_eq!(
        error.to_string(),
        "memory.limit: unknown value 8Gi; allowed: at most capacity.requests.memory, 8191Mi"
    );
    assert_eq!(config.needs_controller(), None);
}
