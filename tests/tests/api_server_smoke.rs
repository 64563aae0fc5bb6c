//! The harness's API server is a real one: it validates by CEL, authorizes by RBAC, and keeps its objects over a restart.

use std::thread;

use prima_tests::api_server::{ApiServer, Backend};
use prima_tests::{timeout_argument, wait_for};

const TEAPOTS: &str = r#"
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: teapots.test.prima.dev}
spec:
  group: test.prima.dev
  scope: Namespaced
  names: {kind: Teapot, plural: teapots}
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            properties: {cups: {type: integer}, lids: {type: integer}}
            x-kubernetes-validations: [{rule: self.lids <= self.cups, message: more lids than cups}]
"#;

const READER: &str = r#"
apiVersion: v1
kind: ServiceAccount
metadata: {name: reader}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: reader}
rules: [{apiGroups: [test.prima.dev], resources: [teapots], verbs: [get, list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: reader}
subjects: [{kind: ServiceAccount, name: reader, namespace: default}]
"#;

fn teapot(name: &str, lids: u32) -> String {
    format!(
        "{{apiVersion: test.prima.dev/v1, kind: Teapot, metadata: {{name: {name}, namespace: default}}, spec: {{cups: 4, lids: {lids}}}}}"
    )
}

#[test]
fn etcd_and_kine_validate_authorize_and_remember() {
    // At once, as tests of different suites run.
    thread::scope(|scope| {
        for backend in [Backend::Etcd, Backend::Kine] {
            scope.spawn(move || validates_authorizes_and_remembers(backend));
        }
    });
}

fn validates_authorizes_and_remembers(backend: Backend) {
    let api = ApiServer::start(backend);

    api.apply(TEAPOTS).expect("the definition is valid");
    api.wait_for_definitions();
    api.apply(&teapot("brown", 1)).expect("a valid teapot");
    let refused = api.apply(&teapot("odd", 9)).expect_err("a CEL rule");
    assert!(
        refused.to_string().contains("more lids than cups"),
        "{refused}"
    );

    api.apply(READER).expect("an account and its role");
    let token = api
        .kubectl(&["create", "token", "reader"])
        .expect("a token");
    let as_reader = format!("--token={}", token.trim());
    // The API server hears of a role a moment after it is made.
    let read = wait_for("may be read", || {
        api.kubectl(&[&as_reader, "get", "teapots", "-o", "name"])
    });
    assert_eq!(read, "teapot.test.prima.dev/brown\n");
    let refused = api.kubectl(&[&as_reader, "delete", "teapot", "brown"]);
    let refused = refused.expect_err("may not be deleted").to_string();
    assert!(
        refused.contains(r#"User "system:serviceaccount:default:reader" cannot delete"#),
        "{refused}"
    );

    api.restart();
    let read = api.kubectl(&[&as_reader, "get", "teapots", "-o", "name"]);
    assert_eq!(
        read.expect("is still there"),
        "teapot.test.prima.dev/brown\n"
    );
}

#[test]
fn what_lost_its_owner_is_collected() {
    let mut api = ApiServer::start(Backend::Kine);
    api.start_controller_manager();
    let owner = "{apiVersion: v1, kind: ConfigMap, metadata: {name: owner, namespace: default}}";
    api.apply(owner).expect("a valid object");
    let uid = api.kubectl(&[
        "get",
        "configmap",
        "owner",
        "-o",
        "jsonpath={.metadata.uid}",
    ]);
    let uid = uid.expect("it is there");
    api.apply(&format!(
        "{{apiVersion: v1, kind: ConfigMap, metadata: {{name: owned, namespace: default, \
         ownerReferences: [{{apiVersion: v1, kind: ConfigMap, name: owner, uid: {uid}}}]}}}}"
    ))
    .expect("a valid object");
    api.kubectl(&["delete", "configmap", "owner"])
        .expect("may be deleted");
    let deleted = ["wait", "--for=delete", "configmap/owned"];
    api.kubectl(&[&deleted[..], &[&timeout_argument()]].concat())
        .expect("is deleted");
}
