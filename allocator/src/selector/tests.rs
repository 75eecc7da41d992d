use tessera_api::names::{DeviceName, DriverName};

use super::*;
use crate::model::{Attribute, Capacity, Device};

fn gpu() -> Device {
    let attribute = |name: &str, value| (name.to_owned(), value);
    Device {
        attributes: [
            attribute("type", Attribute::String("gpu".into())),
            attribute("productName", Attribute::String("NVIDIA H100 80GB HBM3".into())),
            attribute("index", Attribute::Int(3)),
            attribute("mig", Attribute::Bool(false)),
            attribute("driverVersion", Attribute::Version("580.95.5".into())),
            attribute("resource.kubernetes.io/numaNode", Attribute::Int(1)),
            attribute("links", Attribute::List(vec![Attribute::Int(1), Attribute::Int(4)])),
        ]
        .into_iter()
        .collect(),
        capacity: std::sync::Arc::new(crate::model::NameMap::from_iter([(
            "memory".to_owned(),
            Capacity { value: tessera_api::Quantity::parse("81559Mi").unwrap(), policy: None },
        )])),
        shared: true,
        ..Device::new(DeviceName::new("gpu-0").unwrap())
    }
}

fn eval(expression: &str) -> Result<bool, SelectorError> {
    let view = DeviceView::new(&DriverName::ours(), &gpu());
    CompiledSelector::cached(expression)?.matches(&view)
}

#[test]
fn all_kinds_of_selectors_match() {
    for expression in [
        "device.driver == 'gpu.tessera.dev'",
        "device.allowMultipleAllocations",
        "device.attributes['gpu.tessera.dev'].type == 'gpu'",
        "device.attributes['gpu.tessera.dev'].productName.lowerAscii().contains('h100')",
        "device.attributes['gpu.tessera.dev'].productName.matches('^NVIDIA (A|H)100')",
        "device.attributes['resource.kubernetes.io'].numaNode == 1",
        "device.attributes['gpu.tessera.dev'].driverVersion.isGreaterThan(semver('550.0.0'))",
        "device.attributes['gpu.tessera.dev'].driverVersion.major() == 580",
        "device.capacity['gpu.tessera.dev'].memory.compareTo(quantity('40Gi')) >= 0",
        "device.capacity['gpu.tessera.dev'].memory.sub(quantity('8Gi')).asInteger() > 0",
        "has(device.attributes['gpu.tessera.dev'].mig) && !device.attributes['gpu.tessera.dev'].mig",
        "device.attributes['other.example.com'].?x.orValue(1) == 1",
        "!('other.example.com' in device.attributes)",
        "'index' in device.attributes['gpu.tessera.dev']",
        "device.attributes['gpu.tessera.dev'].exists(k, k == 'mig')",
        "cel.bind(a, device.attributes['gpu.tessera.dev'], a.index == 3 && !a.mig)",
        "sets.contains(['gpu', 'mig'], [device.attributes['gpu.tessera.dev'].type])",
        "device.attributes['gpu.tessera.dev'].links.includes(4)",
        "4 in device.attributes['gpu.tessera.dev'].links",
        "[1, 2, 3].exists(i, i == device.attributes['gpu.tessera.dev'].index)",
        "semver('v1.02', true) == semver('1.2.0')",
    ] {
        assert_eq!(eval(expression), Ok(true), "{expression}");
    }
}

#[test]
fn error_of_missing_attribute_suggests_has() {
    let error = eval("device.attributes['gpu.tessera.dev'].nosuch == 'x'").unwrap_err();
    assert!(
        matches!(&error, SelectorError::Runtime { problem } if problem.contains("nosuch")),
        "{error}"
    );
    assert!(error.to_string().contains("has()"), "{error}");
}

#[test]
fn logical_operators_absorb_errors() {
    assert_eq!(eval("true || device.attributes['gpu.tessera.dev'].nosuch == 'x'"), Ok(true));
    assert_eq!(eval("device.attributes['gpu.tessera.dev'].nosuch == 'x' && false"), Ok(false));
}

#[test]
fn invalid_expression_does_not_compile_despite_short_circuit() {
    for expression in
        ["true || a == b", "true || device.nosuch == 1", "device.driver ==", "true || nosuch(1)"]
    {
        let error = CompiledSelector::cached(expression).map(|_| ()).unwrap_err();
        let refused =
            matches!(error, SelectorError::Compile { .. } | SelectorError::Unsupported { .. });
        assert!(refused, "{expression}: {error}");
    }
}

#[test]
fn evaluation_stops_at_cost_limit() {
    let error = eval("lists.range(1000).all(a, lists.range(1000).all(b, a + b >= 0))").unwrap_err();
    assert_eq!(error, SelectorError::TooExpensive(EvaluationLimit::Cost));
    let text = "evaluation on a device costs more than the limit of 1000000 CEL cost units";
    assert!(error.to_string().starts_with(text), "{error}");
}

#[test]
fn deep_nesting_is_a_compile_error() {
    for expression in [
        format!("{}1{} == []", "[".repeat(3000), "]".repeat(3000)),
        format!("1{} > 0", "+1".repeat(5000)),
        format!("device{}", ".a".repeat(5000)),
    ] {
        let compiled = CompiledSelector::cached(&expression);
        assert!(matches!(compiled, Err(SelectorError::Compile { .. })), "{}", &expression[..20]);
    }
}

#[test]
fn long_chain_of_alternatives_compiles() {
    let alternatives: Vec<String> =
        (0..300).map(|i| format!("device.attributes['gpu.tessera.dev'].index == {i}")).collect();
    assert_eq!(eval(&alternatives[..150].join(" || ")), Ok(true));
}

#[test]
fn unsupported_functions_are_named_in_the_error() {
    for (expression, function) in [
        ("duration('1h') > duration('1m')", "duration()"),
        ("isURL('https://example.com')", "isURL()"),
        ("format.dns1123Label().validate('a').hasValue()", "format.dns1123Label()"),
    ] {
        let error = CompiledSelector::cached(expression).unwrap_err().to_string();
        assert!(
            error.contains(function) && error.contains("not supported in this version"),
            "{error}"
        );
    }
}

#[test]
fn non_boolean_result_is_an_error() {
    assert_eq!(eval("device.attributes['gpu.tessera.dev'].index"), Err(SelectorError::NotBoolean));
}

#[test]
fn invalid_version_fails_every_evaluation_on_the_device() {
    let mut device = gpu();
    device.attributes.insert("driverVersion".to_owned(), Attribute::Version("580.95.05".into()));
    let view = DeviceView::new(&DriverName::ours(), &device);
    let error = CompiledSelector::cached("true").unwrap().matches(&view).unwrap_err();
    assert!(matches!(error, SelectorError::BadVersion { .. }));
}

#[test]
fn drivers_are_derived_from_the_expression() {
    for (expression, ours, unnamed, others) in [
        ("device.driver == 'gpu.tessera.dev'", true, false, false),
        (
            "'gpu.tessera.dev' == device.driver && device.attributes[device.driver].?x.orValue(0) == 1",
            true,
            false,
            false,
        ),
        ("device.driver != 'gpu.tessera.dev'", false, true, true),
        ("device.driver in ['a.example.com', 'b.example.com']", false, false, true),
        ("device.driver in ['gpu.tessera.dev', 'gpu.example.com']", true, false, true),
        ("device.driver.endsWith('.tessera.dev')", true, false, true),
        ("device.driver.endsWith('.example.com') && true", false, false, true),
        (
            "device.driver == 'x.example.com' ? true : device.allowMultipleAllocations",
            true,
            true,
            true,
        ),
        ("device.attributes['x.example.com'].model == 'y'", true, true, true),
    ] {
        let selector = CompiledSelector::cached(expression).unwrap();
        let drivers = selector.drivers();
        let is_other = |name: &str| name != "gpu.tessera.dev";
        let found = (
            drivers.may_match("gpu.tessera.dev"),
            drivers.matches_unnamed(),
            drivers.matches_unnamed() || drivers.named().any(is_other),
        );
        assert_eq!(found, (ours, unnamed, others), "{expression}");
    }
}
