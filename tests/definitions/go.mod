// Where other projects define the kinds that the chart makes objects of. Nothing of it is built.
module prima.dev/tests/definitions

go 1.26.5

require (
	github.com/prometheus-operator/prometheus-operator v0.87.1
	sigs.k8s.io/gateway-api v1.3.0
)
