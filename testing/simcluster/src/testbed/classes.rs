//! The chart's DeviceClasses, from the chart's values.

use std::collections::BTreeMap;

use anyhow::Context as _;
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::PostParams;
use kube::{Api, Client};
use serde::Deserialize;
use serde_json::{Value, json};

const VALUES: &str = include_str!("../../../../deploy/chart/tessera/values.yaml");
const DRIVER: &str = "gpu.tessera.dev";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ChartValues {
    device_classes: BTreeMap<String, ClassValues>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ClassValues {
    product_name: String,
}

/// Creates the objects that `templates/deviceclasses.yaml` of the chart renders.
pub(crate) async fn create(client: &Client) -> anyhow::Result<()> {
    let api: Api<DeviceClass> = Api::all(client.clone());
    for class in all()? {
        let object: DeviceClass = serde_json::from_value(class)?;
        api.create(&PostParams::default(), &object).await.context("cannot create DeviceClass")?;
    }
    Ok(())
}

fn all() -> anyhow::Result<Vec<Value>> {
    let values: ChartValues = serde_saphyr::from_str(VALUES).context("invalid chart values")?;
    let mut classes = vec![class(DRIVER, &[])];
    for (name, ClassValues { product_name }) in values.device_classes {
        let selector = format!(
            "device.attributes['{DRIVER}'].productName.matches('(^|[^A-Za-z0-9]){product_name}([^A-Za-z0-9]|$)')"
        );
        classes.push(class(&format!("{name}.{DRIVER}"), &[selector]));
    }
    Ok(classes)
}

fn class(name: &str, selectors: &[String]) -> Value {
    let gpu = format!("device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'");
    let selectors: Vec<_> = [&gpu]
        .into_iter()
        .chain(selectors)
        .map(|expression| json!({"cel": {"expression": expression}}))
        .collect();
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
        "metadata": {"name": name}, "spec": {"selectors": selectors},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The golden file is helm's output, so both stay equal.
    #[test]
    fn classes_equal_rendered_chart() {
        let golden = include_str!("../../../../deploy/chart/golden/default.yaml");
        let classes = all().unwrap();
        assert!(classes.len() > 2);
        for class in classes {
            let name = class["metadata"]["name"].as_str().unwrap();
            assert!(golden.contains(&format!("name: {name}\n")), "{name}");
            for selector in class["spec"]["selectors"].as_array().unwrap() {
                let expression = selector["cel"]["expression"].as_str().unwrap();
                assert!(golden.contains(expression), "{expression}");
            }
        }
    }
}
