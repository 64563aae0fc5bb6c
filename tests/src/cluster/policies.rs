//! NetworkPolicies, which the network of these clusters (ptp) does not enforce: each node is given iptables rules that do what they say.
//! Rules hold for the pods that are there when they are made.
//!
//! Only what the chart's policies are made of: TCP that comes in, ports by number, and peers chosen by labels. Anything else is an
//! error, so that no policy is taken for a weaker one. As with any plugin, a node reaches its own pods.

use std::fmt::Write as _;

use serde_json::Value;

pub(crate) const CHAIN: &str = "NETWORK-POLICY";

/// What `iptables-restore --noflush` takes, from a list of NetworkPolicies, Namespaces and Pods of all namespaces.
pub(crate) fn rules(objects: &[Value]) -> Result<String, String> {
    let of_kind = |kind: &str| -> Vec<&Value> {
        let all = objects.iter();
        all.filter(|object| object["kind"] == kind).collect()
    };
    let world = World {
        pods: of_kind("Pod"),
        namespaces: of_kind("Namespace"),
    };
    let (mut allowed, mut refused) = (String::new(), String::new());
    for policy in of_kind("NetworkPolicy") {
        let namespace = text(policy, "/metadata/namespace");
        let spec = &policy["spec"];
        known(spec, &["podSelector", "policyTypes", "ingress"])?;
        if spec["policyTypes"] != serde_json::json!(["Ingress"]) {
            return Err(format!("not of what comes in alone: {spec}"));
        }
        for pod in world.addresses(&[namespace], &spec["podSelector"])? {
            for rule in items(&spec["ingress"]) {
                known(rule, &["from", "ports"])?;
                for source in world.sources(namespace, &rule["from"])? {
                    for ports in ports(&rule["ports"])? {
                        // Writing to a String does not fail.
                        let _ = writeln!(allowed, "-A {CHAIN}{source} -d {pod}{ports} -j RETURN");
                    }
                }
            }
            let _ = writeln!(refused, "-A {CHAIN} -d {pod} -j REJECT");
        }
    }
    Ok(format!(
        "*filter\n:{CHAIN} - [0:0]\n\
         -A {CHAIN} -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN\n\
         {allowed}{refused}COMMIT\n"
    ))
}

struct World<'a> {
    pods: Vec<&'a Value>,
    namespaces: Vec<&'a Value>,
}

impl World<'_> {
    /// Matches of iptables; without `from`, everyone.
    fn sources(&self, namespace: &str, from: &Value) -> Result<Vec<String>, String> {
        if items(from).is_empty() {
            return Ok(vec![String::new()]);
        }
        let mut sources = Vec::new();
        for peer in items(from) {
            known(peer, &["namespaceSelector", "podSelector"])?;
            let namespaces = match &peer["namespaceSelector"] {
                Value::Null => vec![namespace],
                selector => self.namespaces_of(selector)?,
            };
            let pods = self.addresses(&namespaces, &peer["podSelector"])?;
            sources.extend(pods.iter().map(|pod| format!(" -s {pod}")));
        }
        Ok(sources)
    }

    fn namespaces_of(&self, selector: &Value) -> Result<Vec<&str>, String> {
        let mut found = Vec::new();
        for namespace in &self.namespaces {
            if selects(selector, namespace)? {
                found.push(text(namespace, "/metadata/name"));
            }
        }
        Ok(found)
    }

    fn addresses(&self, namespaces: &[&str], selector: &Value) -> Result<Vec<&str>, String> {
        let mut found = Vec::new();
        for pod in &self.pods {
            let address = text(pod, "/status/podIP");
            let inside = namespaces.contains(&text(pod, "/metadata/namespace"));
            if inside && !address.is_empty() && selects(selector, pod)? {
                found.push(address);
            }
        }
        Ok(found)
    }
}

/// Whether an object has the labels; without a selector, every object does.
fn selects(selector: &Value, object: &Value) -> Result<bool, String> {
    known(selector, &["matchLabels"])?;
    let Some(labels) = selector["matchLabels"].as_object() else {
        return Ok(true);
    };
    let has = &object["metadata"]["labels"];
    Ok(labels.iter().all(|(name, value)| &has[name] == value))
}

/// Matches of iptables; without ports, all.
fn ports(ports: &Value) -> Result<Vec<String>, String> {
    if items(ports).is_empty() {
        return Ok(vec![String::new()]);
    }
    let range = |port: &Value| {
        known(port, &["port", "endPort", "protocol"])?;
        let first = port["port"].as_u64();
        let first = first.ok_or_else(|| format!("not a port's number: {port}"))?;
        match port["protocol"].as_str() {
            None | Some("TCP") => {}
            Some(other) => return Err(format!("{other} is not TCP")),
        }
        let last = port["endPort"].as_u64().unwrap_or(first);
        Ok(format!(" -p tcp --dport {first}:{last}"))
    };
    items(ports).iter().map(range).collect()
}

/// Checks that there are no other fields.
fn known(object: &Value, fields: &[&str]) -> Result<(), String> {
    let names = object
        .as_object()
        .into_iter()
        .flat_map(|object| object.keys());
    for name in names {
        if !fields.contains(&name.as_str()) {
            return Err(format!("not enforced by the tests: {name} of {object}"));
        }
    }
    Ok(())
}

fn items(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    let found = object.pointer(pointer).and_then(Value::as_str);
    found.unwrap_or_default()
}
