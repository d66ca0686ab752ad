{{- /* Combinations of values that the schema cannot judge. Included once, by the workload. */ -}}
{{- define "kdt.checks" -}}
{{- $v := .Values -}}
{{- $tp := int $v.tensorParallel -}}
{{- $heads := int $v.model.attentionHeads -}}
{{- if ne (mod $heads $tp) 0 -}}
{{- fail (printf "tensorParallel: %d does not divide model.attentionHeads (%d)" $tp $heads) -}}
{{- end -}}
{{- if not (has $tp (list 1 2 4 8)) -}}
{{- fail (printf "tensorParallel: %d is none of 1, 2, 4 and 8" $tp) -}}
{{- end -}}

{{- $sources := 0 -}}
{{- if $v.model.pvc.claimName }}{{ $sources = add $sources 1 }}{{ end -}}
{{- if $v.model.hostPath.path }}{{ $sources = add $sources 1 }}{{ end -}}
{{- if $v.model.shipped }}{{ $sources = add $sources 1 }}{{ end -}}
{{- if ne (int $sources) 1 -}}
{{- fail (printf "model: set exactly one of model.pvc.claimName, model.hostPath.path and model.shipped (%d are set)" (int $sources)) -}}
{{- end -}}
{{- if and $v.model.shipped (ne $v.backend "cpu") -}}
{{- fail "model.shipped: the image's small model is for backend cpu" -}}
{{- end -}}
{{- if and $v.model.shipped $v.model.path -}}
{{- fail "model.path: the shipped model has no other folder" -}}
{{- end -}}
{{- range $name, $path := dict "model.path" $v.model.path "model.drafterPath" $v.model.drafterPath -}}
{{- if has ".." (splitList "/" $path) -}}
{{- fail (printf "%s: %s leaves the volume" $name $path) -}}
{{- end -}}
{{- end -}}

{{- if not $v.model.drafterPath -}}
{{- if ne (toString $v.coordinator.budget) "auto" -}}
{{- fail "coordinator.budget: does nothing without model.drafterPath" -}}
{{- end -}}
{{- if ne $v.coordinator.tree "best-first" -}}
{{- fail "coordinator.tree: does nothing without model.drafterPath" -}}
{{- end -}}
{{- end -}}

{{- if $v.model.copy.enabled -}}
{{- if $v.model.shipped -}}
{{- fail "model.copy.enabled: the shipped model needs no copy" -}}
{{- end -}}
{{- if eq (empty $v.model.copy.fromPvc.claimName) (empty $v.model.copy.fromHostPath.path) -}}
{{- fail "model.copy: set exactly one of model.copy.fromPvc.claimName and model.copy.fromHostPath.path" -}}
{{- end -}}
{{- if and (eq $v.model.copy.as "job") $v.model.hostPath.path -}}
{{- fail "model.copy.as: a job may run on another node than the pods; use initContainer with model.hostPath" -}}
{{- end -}}
{{- end -}}

{{- if and $v.tls.enabled (not $v.tls.secretName) -}}
{{- fail "tls.secretName: needed when tls.enabled is true" -}}
{{- end -}}
{{- if and $v.tls.clientCertificates (not $v.tls.enabled) -}}
{{- fail "tls.clientCertificates: needs tls.enabled" -}}
{{- end -}}
{{- if and $v.apiKeys.enabled (not $v.apiKeys.secretName) -}}
{{- fail "apiKeys.secretName: needed when apiKeys.enabled is true" -}}
{{- end -}}
{{- if and $v.apiKeys.enabled (not $v.tls.enabled) (not $v.apiKeys.allowInsecure) -}}
{{- fail "apiKeys.enabled: keys would travel in plaintext; set tls.enabled, or apiKeys.allowInsecure where a proxy ends TLS" -}}
{{- end -}}

{{- if and $v.serviceMonitor.enabled (not $v.metrics.enabled) -}}
{{- fail "serviceMonitor.enabled: needs metrics.enabled" -}}
{{- end -}}
{{- if $v.autoscaling.enabled -}}
{{- if not $v.autoscaling.prometheusAddress -}}
{{- fail "autoscaling.prometheusAddress: needed when autoscaling.enabled is true" -}}
{{- end -}}
{{- if not $v.metrics.enabled -}}
{{- fail "autoscaling.enabled: needs metrics.enabled" -}}
{{- end -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas: %d is more than autoscaling.maxReplicas (%d)" (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- end -}}

{{- if $v.multiNode.enabled -}}
{{- if ne $v.backend "cuda" -}}
{{- fail "multiNode.enabled: ranks of several nodes exchange through NCCL; backend must be cuda" -}}
{{- end -}}
{{- if ne (mod $tp (int $v.multiNode.nodes)) 0 -}}
{{- fail (printf "multiNode.nodes: %d does not divide tensorParallel (%d)" (int $v.multiNode.nodes) $tp) -}}
{{- end -}}
{{- if not (or $v.multiNode.tlsSecretName $v.multiNode.allowPlaintext) -}}
{{- fail "multiNode.tlsSecretName: workers on TCP need mutual TLS (or multiNode.allowPlaintext=true on a network that nobody else is on)" -}}
{{- end -}}
{{- end -}}

{{- /* All ports of a pod share one network namespace. */ -}}
{{- $metricsEnd := add (int $v.metrics.port) $tp -}}
{{- if $v.metrics.enabled -}}
{{- if gt (int $metricsEnd) 65535 -}}
{{- fail (printf "metrics.port: %d leaves no port for every rank" (int $v.metrics.port)) -}}
{{- end -}}
{{- range $port := list 50051 50052 -}}
{{- if and (ge $port (int $v.metrics.port)) (le $port (int $metricsEnd)) -}}
{{- fail (printf "metrics.port: %d to %d (one a rank) would take port %d of the API" (int $v.metrics.port) (int $metricsEnd) $port) -}}
{{- end -}}
{{- end -}}
{{- if and $v.multiNode.enabled (le (int $v.multiNode.workerPort) (int $metricsEnd)) (ge (add (int $v.multiNode.workerPort) $tp) (int $v.metrics.port)) -}}
{{- fail (printf "multiNode.workerPort: the ranks' ports from %d on and metrics.port %d to %d overlap" (int $v.multiNode.workerPort) (int $v.metrics.port) (int $metricsEnd)) -}}
{{- end -}}
{{- end -}}
{{- end }}
