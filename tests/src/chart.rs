//! What helm renders, as text that people review: each object under its kind and name, one line per field; of another rendering, only the
//! differences. Neither the order of objects nor the layout of the YAML matters.

use std::collections::BTreeMap;

use serde_json::Value;

/// By kind and name. If an object outside the release's namespace shares both with one inside, its key also has its namespace.
pub type Objects = BTreeMap<String, Value>;

/// Fields whose value is longer are shown part by part.
const WIDTH: usize = 110;
/// Labels of every object; `chart_renders` checks them.
const COMMON_LABELS: [&str; 5] = [
    "helm.sh/chart",
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
];

/// The objects of a stream of YAML documents.
pub fn objects(yaml: &str) -> Objects {
    let documents: Vec<Value> = serde_saphyr::from_multiple(yaml).expect("YAML");
    let mut objects = Objects::new();
    let mut outside = Vec::new();
    for object in documents.into_iter().filter(|object| !object.is_null()) {
        let (kind, name) = (text(&object["kind"]), text(&object["metadata"]["name"]));
        let key = format!("{kind} {name}");
        match objects.contains_key(&key) {
            true => outside.push((key, object)),
            false => drop(objects.insert(key, object)),
        }
    }
    for (key, object) in outside {
        let namespace = text(&object["metadata"]["namespace"]);
        let before = objects.insert(format!("{key} in {namespace}"), object);
        assert!(before.is_none(), "{key} is rendered twice");
    }
    objects
}

/// All objects, whole.
pub fn shown(objects: &Objects) -> String {
    differences(&Objects::new(), objects)
}

/// What `after` has that `before` has not, and the other way round. A new object whose name extends that of an old one is compared with the
/// old one.
pub fn differences(before: &Objects, after: &Objects) -> String {
    let mut lines = Vec::new();
    let gone = before.keys().filter(|key| !after.contains_key(*key));
    lines.extend(gone.map(|key| format!("- {key}\n")));
    for (key, object) in after {
        let (heading, old) = match before.get(key) {
            Some(old) => (format!("~ {key}\n"), old.clone()),
            None => match before.iter().find(|(other, _)| key.starts_with(*other)) {
                Some((other, old)) => (format!("+ {key}, as {other} but\n"), old.clone()),
                None => (format!("+ {key}\n"), Value::Object(Default::default())),
            },
        };
        let mut fields = Vec::new();
        compare("", &own(old), &own(object.clone()), &mut fields);
        if !fields.is_empty() || !before.contains_key(key) {
            lines.push(heading);
            lines.extend(fields);
        }
    }
    lines.concat()
}

/// Leaves out what the heading or every object says.
fn own(mut object: Value) -> Value {
    if let Some(fields) = object.as_object_mut() {
        fields.shift_remove("kind");
    }
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.shift_remove("name");
        if let Some(labels) = metadata.get_mut("labels").and_then(Value::as_object_mut) {
            labels.retain(|label, _| !COMMON_LABELS.contains(&label.as_str()));
        }
    }
    object
}

fn compare(path: &str, before: &Value, after: &Value, lines: &mut Vec<String>) {
    if before == after {
        return;
    }
    let (Some(old), Some(new)) = (parts(before), parts(after)) else {
        show('-', path, before, lines);
        show('+', path, after, lines);
        return;
    };
    for (name, value) in &old {
        match new.iter().find(|(other, _)| other == name) {
            Some((_, other)) => compare(&join(path, name), value, other, lines),
            None => lines.push(format!("  - {}\n", join(path, name))),
        }
    }
    for (name, value) in new {
        if old.iter().all(|(other, _)| *other != name) {
            show('+', &join(path, &name), value, lines);
        }
    }
}

fn show(sign: char, path: &str, value: &Value, lines: &mut Vec<String>) {
    let whole = value.to_string();
    match parts(value) {
        Some(parts) if !parts.is_empty() && whole.len() > WIDTH => {
            for (name, part) in parts {
                show(sign, &join(path, &name), part, lines);
            }
        }
        _ => lines.push(format!("  {sign} {path}: {whole}\n")),
    }
}

/// Fields of an object, and elements of a list of objects: by their names where they have such.
fn parts<'a>(value: &'a Value) -> Option<Vec<(String, &'a Value)>> {
    match value {
        Value::Object(fields) => Some(
            fields
                .iter()
                .map(|(name, field)| (name.clone(), field))
                .collect(),
        ),
        Value::Array(elements) if elements.iter().any(Value::is_object) => {
            let named = |(index, element): (usize, &'a Value)| {
                let name = element.get("name").and_then(Value::as_str);
                let name = name.map_or_else(|| index.to_string(), str::to_owned);
                (format!("[{name}]"), element)
            };
            Some(elements.iter().enumerate().map(named).collect())
        }
        _ => None,
    }
}

fn join(path: &str, name: &str) -> String {
    match path {
        "" => name.to_owned(),
        path => format!("{path}.{name}"),
    }
}

fn text(value: &Value) -> &str {
    value
        .as_str()
        .unwrap_or_else(|| panic!("{value} is no text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "
kind: Job
metadata: {name: a, labels: {app.kubernetes.io/name: prima}}
spec: {containers: [{name: one, image: x}, {name: two, image: w}], replicas: 2}
---
kind: Role
metadata: {name: r}
";

    #[test]
    fn each_kind_of_difference_is_told() {
        let before = objects(BEFORE);
        assert_eq!(differences(&before, &before), "");
        let after = objects(
            "
kind: Job
metadata: {name: a}
spec: {containers: [{name: two, image: z}, {name: three, image: x}], ports: [80, 81]}
---
kind: Job
metadata: {name: a-gpu}
spec: {containers: [{name: one, image: x}, {name: two, image: w}], replicas: 3}
---
kind: Pod
metadata: {name: p}
",
        );
        assert_eq!(
            differences(&before, &after),
            "- Role r
~ Job a
  - metadata.labels
  - spec.containers.[one]
  - spec.containers.[two].image: \"w\"
  + spec.containers.[two].image: \"z\"
  + spec.containers.[three]: {\"name\":\"three\",\"image\":\"x\"}
  - spec.replicas
  + spec.ports: [80,81]
+ Job a-gpu, as Job a but
  - metadata.labels
  - spec.replicas: 2
  + spec.replicas: 3
+ Pod p
  + metadata: {}
"
        );
    }
}
