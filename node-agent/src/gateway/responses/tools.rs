//! The functions that a request offers. Codex sends those of an MCP server as a namespace, which chats have not: there, each has one name.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::gateway::openai_error::ApiError;
use crate::gateway::request::Fields;

/// The client's namespace and name of a function, by its name in the chat.
pub type Namespaced = HashMap<String, (String, String)>;

/// OpenAI's limit on names. It is part of the name of each of its functions.
const MAX_NAMESPACE_BYTES: usize = 64;

/// As the tools of a chat. What runs at OpenAI's is left out.
pub fn functions(tools: &[Value], namespaced: &mut Namespaced) -> Result<Vec<Value>, ApiError> {
    let mut functions = Vec::new();
    for (number, tool) in tools.iter().enumerate() {
        match tool["type"].as_str() {
            Some("function") => functions.push(function(tool)),
            Some("namespace") => {
                let path = format!("tools[{number}]");
                for tool in of_namespace(&Fields::of(tool, &path)?, namespaced)? {
                    functions.push(function(&tool));
                }
            }
            _ => {}
        }
    }
    Ok(functions)
}

/// Its functions, with their names in the chat.
fn of_namespace(
    namespace: &Fields<'_>,
    namespaced: &mut Namespaced,
) -> Result<Vec<Value>, ApiError> {
    let own = namespace
        .string("name")?
        .ok_or_else(|| namespace.missing("name"))?;
    if !(1..=MAX_NAMESPACE_BYTES).contains(&own.len()) {
        let must = format!("a text of 1 to {MAX_NAMESPACE_BYTES} bytes");
        return Err(namespace.wrong("name", &must, &own.into()));
    }
    let tools = namespace
        .array("tools")?
        .ok_or_else(|| namespace.missing("tools"))?;
    let functions = tools.iter().filter(|tool| tool["type"] == "function");
    let functions = functions.map(|tool| {
        let mut tool = tool.clone();
        if let Some(name) = tool["name"].as_str().map(String::from) {
            let flat = flat_name(own, &name);
            tool["name"] = flat.clone().into();
            namespaced.insert(flat, (own.to_owned(), name));
        }
        tool
    });
    Ok(functions.collect())
}

/// What a function of a namespace is called in the chat, as Codex writes it in one word.
pub fn flat_name(namespace: &str, name: &str) -> String {
    // Some versions end the namespace so.
    let between = if namespace.ends_with("__") { "" } else { "__" };
    format!("{namespace}{between}{name}")
}

fn function(tool: &Value) -> Value {
    let mut function = tool.clone();
    if let Some(map) = function.as_object_mut() {
        // The others stay in their order, in which the model reads them.
        map.shift_remove("type");
    }
    json!({"type": "function", "function": function})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_namespaces_stand_among_the_others() {
        let function = |name: &str| json!({"type": "function", "name": name});
        let tools = json!([
            function("f"),
            {"type": "namespace", "name": "mcp__x", "tools": [function("g"), {"type": "custom", "name": "h"}]},
            {"type": "web_search"},
            {"type": "namespace", "name": "mcp__y__", "tools": [function("g")]},
        ]);
        let mut namespaced = Namespaced::new();
        let found = functions(tools.as_array().unwrap(), &mut namespaced).unwrap();
        let names: Vec<&str> = found
            .iter()
            .map(|tool| tool["function"]["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["f", "mcp__x__g", "mcp__y__g"]);
        let own = |flat: &str| namespaced.get(flat).cloned();
        assert_eq!(own("f"), None);
        assert_eq!(own("mcp__x__g"), Some(("mcp__x".into(), "g".into())));
        assert_eq!(own("mcp__y__g"), Some(("mcp__y__".into(), "g".into())));
    }

    #[test]
    fn a_wrong_namespace_is_named() {
        let long = "n".repeat(MAX_NAMESPACE_BYTES + 1);
        for (tool, param) in [
            (json!({"type": "namespace", "tools": []}), "tools[0].name"),
            (
                json!({"type": "namespace", "name": "", "tools": []}),
                "tools[0].name",
            ),
            (
                json!({"type": "namespace", "name": long, "tools": []}),
                "tools[0].name",
            ),
            (json!({"type": "namespace", "name": "n"}), "tools[0].tools"),
            (
                json!({"type": "namespace", "name": "n", "tools": {}}),
                "tools[0].tools",
            ),
        ] {
            let found = functions(std::slice::from_ref(&tool), &mut Namespaced::new());
            let error = found.unwrap_err();
            assert_eq!(error.body()["error"]["param"], param, "{tool}");
        }
    }
}
