use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::{claim, created, pod, refusal, server, server_api, slice, typed};

/// Returns the error for a slice whose first device was changed by `change`.
async fn refused_device(client: &Client, change: impl FnOnce(&mut Value)) -> String {
    let mut object = serde_json::to_value(slice("s", "node-a")).unwrap();
    change(&mut object["spec"]);
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let (code, reason, message) =
        refusal(slices.create(&PostParams::default(), &typed(object)).await);
    assert_eq!((code, reason.as_str()), (422, "Invalid"));
    message
}

#[tokio::test]
async fn slice_holds_128_devices_or_64_with_taints() {
    let (_api, client) = server().await;
    let slices: Api<ResourceSlice> = Api::all(client);
    for (count, tainted, fits) in
        [(64, true, true), (65, true, false), (128, false, true), (129, false, false)]
    {
        let mut object = slice(&format!("s-{count}"), "node-a");
        let mut device = object.spec.devices.take().unwrap().remove(0);
        if !tainted {
            device.taints = None;
        }
        let numbered = |index| k8s_openapi::api::resource::v1::Device {
            name: format!("gpu-{index}"),
            ..device.clone()
        };
        object.spec.devices = Some((0..count).map(numbered).collect());
        let made = slices.create(&PostParams::default(), &object).await;
        if fits {
            assert_eq!(made.unwrap().spec.devices.unwrap().len(), count);
        } else {
            let most = if tainted { 64 } else { 128 };
            let expected =
                format!("spec.devices: Too many: {count}: must have at most {most} items");
            assert!(refusal(made).2.ends_with(&expected));
        }
    }
}

#[tokio::test]
async fn slice_error_names_the_field() {
    let (_api, client) = server().await;
    type Change = fn(&mut Value);
    let cases: &[(Change, &str)] = &[
        (|spec| spec["driver"] = "gpu_x".into(), "spec.driver: Invalid value: \"gpu_x\""),
        (|spec| spec["allNodes"] = true.into(), "exactly one of `nodeName`"),
        (|spec| spec["pool"]["resourceSliceCount"] = 0.into(), "spec.pool.resourceSliceCount"),
        (
            |spec| spec["devices"][0]["name"] = "GPU-1F".into(),
            "spec.devices[0].name: Invalid value",
        ),
        (
            |spec| spec["devices"] = json!([{"name": "a"}, {"name": "a"}]),
            "spec.devices[1]: Duplicate value: \"a\"",
        ),
        (
            |spec| {
                spec["devices"][0]["attributes"]["driverVersion"]["version"] = "580.95.05".into()
            },
            "spec.devices[0].attributes[driverVersion].version: Invalid value: \"580.95.05\"",
        ),
        (
            |spec| {
                spec["devices"][0]["attributes"]["productName"]["string"] = "x".repeat(65).into()
            },
            "attributes[productName].string: Too long",
        ),
        (
            |spec| spec["devices"][0]["attributes"]["product-name"] = json!({"string": "x"}),
            "spec.devices[0].attributes: Invalid value: \"product-name\"",
        ),
        (
            |spec| spec["devices"][0]["allowMultipleAllocations"] = false.into(),
            "requestPolicy: Forbidden: allowMultipleAllocations must be true",
        ),
        (
            |spec| {
                spec["devices"][0]["capacity"]["memory"]["requestPolicy"]["default"] =
                    "512Ki".into()
            },
            "requestPolicy.validRange.default: Invalid value: \"512Ki\": default is less than min: 1Mi",
        ),
        (
            |spec| {
                spec["devices"][0]["capacity"]["memory"]["requestPolicy"]["default"] =
                    "1500Ki".into()
            },
            "requestPolicy.validRange.step: Invalid value: \"1500Ki\": value is not a multiple of a given step (1Mi) from (1Mi)",
        ),
        (
            |spec| spec["devices"][0]["taints"][0]["effect"] = "Maybe".into(),
            "taints[0].effect: Unsupported value: \"Maybe\"",
        ),
    ];
    for (change, expected) in cases {
        let message = refused_device(&client, change).await;
        assert!(message.contains(expected), "{message} does not contain {expected}");
    }
}

#[tokio::test]
async fn slice_driver_pool_and_node_are_immutable() {
    let (_api, client) = server().await;
    let slices: Api<ResourceSlice> = Api::all(client);
    let made = created(&slices, slice("s", "node-a")).await;
    assert_eq!(made.metadata.generation, Some(1));
    assert!(
        made.spec.devices.as_ref().unwrap()[0].taints.as_ref().unwrap()[0].time_added.is_some()
    );
    let patch = Patch::Merge(
        json!({"spec": {"driver": "a.b", "nodeName": "node-b", "pool": {"name": "node-b"}}}),
    );
    let message = refusal(slices.patch("s", &PatchParams::default(), &patch).await).2;
    for field in ["spec.driver", "spec.pool.name", "spec.nodeName"] {
        assert!(message.contains(&format!("{field}: Invalid value")), "{message}");
    }
}

#[tokio::test]
async fn claim_error_names_the_field() {
    let (_api, claims) = server_api::<ResourceClaim>().await;
    type Change = fn(&mut Value);
    let cases: &[(Change, &str)] = &[
        (
            |devices| devices["requests"][0]["name"] = "GPU".into(),
            "spec.devices.requests[0].name: Invalid value",
        ),
        (
            |devices| devices["requests"][0]["exactly"]["count"] = (-1).into(),
            "exactly.count: Invalid value: -1",
        ),
        (
            |devices| devices["requests"][0]["exactly"]["allocationMode"] = "Some".into(),
            "allocationMode: Unsupported value: \"Some\"",
        ),
        (
            |devices| {
                devices["requests"][0]["firstAvailable"] =
                    json!([{"name": "a", "deviceClassName": "b"}])
            },
            "exactly one of",
        ),
        (
            |devices| {
                devices["requests"][0]["exactly"]["selectors"] =
                    json!([{"cel": {"expression": ""}}])
            },
            "selectors[0].cel.expression: Invalid value: \"\": compilation failed",
        ),
        (
            |devices| devices["constraints"] = json!([{"matchAttribute": "numaNode"}]),
            "matchAttribute: Invalid value",
        ),
        (
            |devices| {
                devices["constraints"] = json!([{"matchAttribute": "a.b/c", "requests": ["other"]}])
            },
            "constraints[0].requests[0]: Invalid value: \"other\"",
        ),
        (
            |devices| {
                devices["config"] = json!([{"opaque": {"driver": "a.b", "parameters": "text"}}])
            },
            "opaque.parameters: Invalid value",
        ),
        (
            |devices| devices["requests"][0]["exactly"]["adminAccess"] = true.into(),
            "admin access to devices requires",
        ),
    ];
    for (change, expected) in cases {
        let mut object = serde_json::to_value(claim("c")).unwrap();
        change(&mut object["spec"]["devices"]);
        let (code, _, message) =
            refusal(claims.create(&PostParams::default(), &typed(object)).await);
        assert_eq!(code, 422);
        assert!(message.contains(expected), "{message} does not contain {expected}");
    }
}

#[tokio::test]
async fn pod_error_names_the_field() {
    let (_api, pods) = server_api::<Pod>().await;
    type Change = fn(&mut Value);
    let cases: &[(Change, &str)] = &[
        (|pod| pod["metadata"]["name"] = "A".into(), "metadata.name: Invalid value: \"A\""),
        (
            |pod| pod["metadata"]["labels"] = json!({"a": "-"}),
            "metadata.labels: Invalid value: \"-\"",
        ),
        (|pod| pod["spec"]["containers"] = json!([]), "spec.containers: Required value"),
        (
            |pod| pod["spec"]["containers"][0]["image"] = "".into(),
            "spec.containers[0].image: Required value",
        ),
        (
            |pod| pod["spec"]["containers"][0]["resources"] = json!({"claims": [{"name": "gpu"}]}),
            "resources.claims[0]: Not found: \"gpu\": must be one of the names in pod.spec.resourceClaims which is empty",
        ),
        (
            |pod| pod["spec"]["resourceClaims"] = json!([{"name": "gpu"}]),
            "must specify one of: `resourceClaimName`",
        ),
    ];
    for (change, expected) in cases {
        let mut object = serde_json::to_value(pod("p")).unwrap();
        change(&mut object);
        let (code, _, message) = refusal(pods.create(&PostParams::default(), &typed(object)).await);
        assert_eq!(code, 422);
        assert!(message.contains(expected), "{message} does not contain {expected}");
    }
}

#[tokio::test]
async fn invalid_quantity_fails_to_decode() {
    let (_api, client) = server().await;
    let request = async |path: &str, body: Value| {
        let request = axum::http::Request::post(path)
            .header("content-type", "application/json")
            .body(body.to_string().into_bytes())
            .unwrap();
        refusal(client.request::<Value>(request).await)
    };
    let mut object = serde_json::to_value(slice("s", "node-a")).unwrap();
    object["spec"]["devices"][0]["capacity"]["memory"]["value"] = "lots".into();
    let (code, _, message) = request("/apis/resource.k8s.io/v1/resourceslices", object).await;
    assert_eq!(code, 400);
    assert!(message.contains("quantities must match the regular expression"), "{message}");
    let mut object = serde_json::to_value(claim("c")).unwrap();
    object["spec"]["devices"]["requests"][0]["exactly"]["capacity"] =
        json!({"requests": {"memory": "lots"}});
    let path = format!(
        "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims",
        client.default_namespace()
    );
    let (code, _, message) = request(&path, object).await;
    assert_eq!(code, 400);
    assert!(message.contains("quantities must match the regular expression"), "{message}");
}
