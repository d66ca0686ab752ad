{{- /* Pod template. Call with (dict "root" $ "coordinator" bool "component" name). */ -}}
{{- define "kdt.podTemplate" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
metadata:
  labels:
    # No version here: a new chart version alone must not make eight ranks load again.
    {{- include "kdt.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with $v.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ .coordinator | ternary "coordinator" "workers" }}
    {{- with $v.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: {{ include "kdt.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "kdt.gracePeriod" $root }}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  securityContext: {{ toYaml $v.podSecurityContext | nindent 4 }}
  {{- with $v.nodeSelector }}
  nodeSelector: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "kdt.tolerations" $root }}
  tolerations: {{ . | nindent 4 }}
  {{- end }}
  {{- with $v.affinity }}
  affinity: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.topologySpreadConstraints }}
  topologySpreadConstraints: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $v.model.copy.enabled (eq $v.model.copy.as "initContainer") }}
  initContainers:
    - {{ include "kdt.copyContainer" $root | nindent 6 | trim }}
  {{- end }}
  containers:
    {{- if .coordinator }}
    - {{ include "kdt.coordinator" $root | nindent 6 | trim }}
    {{- end }}
    - {{ include "kdt.workers" $root | nindent 6 | trim }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    # NCCL, CUDA IPC and the ranks' shared memory: one /dev/shm for all of them, in memory.
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $v.worker.shmSize }}}
    {{- if not $v.multiNode.enabled }}
    - name: sockets
      emptyDir: {medium: Memory, sizeLimit: 1Mi}
    {{- end }}
    {{- if not $v.model.shipped }}
    - name: model
      {{- include "kdt.modelVolume" $root | nindent 6 }}
    {{- end }}
    {{- if and $v.model.copy.enabled (eq $v.model.copy.as "initContainer") }}
    - name: model-source
      {{- include "kdt.copySourceVolume" $root | nindent 6 }}
    {{- end }}
    {{- if and .coordinator $v.tls.enabled }}
    - name: tls
      secret: {secretName: {{ $v.tls.secretName }}, defaultMode: 0440}
    {{- end }}
    {{- if and .coordinator $v.apiKeys.enabled }}
    - name: api-keys
      secret: {secretName: {{ $v.apiKeys.secretName }}, defaultMode: 0440}
    {{- end }}
    {{- if and $v.multiNode.enabled $v.multiNode.tlsSecretName }}
    - name: workers-tls
      secret: {secretName: {{ $v.multiNode.tlsSecretName }}, defaultMode: 0440}
    {{- end }}
{{- end }}

{{- define "kdt.modelVolume" -}}
{{- if .Values.model.pvc.claimName -}}
persistentVolumeClaim: {claimName: {{ .Values.model.pvc.claimName }}}
{{- else -}}
hostPath: {path: {{ .Values.model.hostPath.path | quote }}, type: {{ .Values.model.copy.enabled | ternary "DirectoryOrCreate" "Directory" }}}
{{- end -}}
{{- end }}

{{- define "kdt.copySourceVolume" -}}
{{- with .Values.model.copy.fromPvc.claimName -}}
persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
{{- else -}}
hostPath: {path: {{ .Values.model.copy.fromHostPath.path | quote }}, type: Directory}
{{- end -}}
{{- end }}

{{- /* What every container has. */ -}}
{{- define "kdt.containerBase" -}}
image: {{ include "kdt.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext: {{ toYaml .Values.securityContext | nindent 2 }}
terminationMessagePolicy: FallbackToLogsOnError
{{- end }}

{{- define "kdt.copyContainer" -}}
name: copy-model
{{ include "kdt.containerBase" . }}
command: [/opt/kdtree-engine/bin/copy-model, /source, /models]
resources: {{ toYaml .Values.model.copy.resources | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: model-source, mountPath: /source, readOnly: true}
  - {name: model, mountPath: /models}
{{- end }}

{{- define "kdt.coordinator" -}}
{{- $v := .Values -}}
name: coordinator
{{ include "kdt.containerBase" . }}
command: [/opt/kdtree-engine/bin/kdt-coordinator]
args:
  - --model={{ include "kdt.modelDir" . }}
  {{- with include "kdt.drafterDir" . }}
  - --drafter={{ . }}
  {{- end }}
  - --workers={{ include "kdt.workerAddresses" . }}
  - --listen=0.0.0.0:50051
  - --health_listen=0.0.0.0:50052
  # The workers come and go by themselves; requests are kept until they are back.
  - --on_group_loss=rejoin
  - --max_waiting={{ int $v.coordinator.maxWaiting }}
  - --max_running={{ int $v.coordinator.maxRunning }}
  - --prefill_chunk={{ int $v.coordinator.prefillChunk }}
  - --step_timeout_ms={{ int $v.coordinator.stepTimeoutMs }}
  - --budget={{ $v.coordinator.budget }}
  - --tree={{ $v.coordinator.tree }}
  - --drain_timeout_s={{ int $v.coordinator.drainTimeoutSeconds }}
  - --log_level={{ $v.coordinator.logLevel }}
  {{- if $v.metrics.enabled }}
  - --metrics_host=0.0.0.0
  - --metrics_port={{ int $v.metrics.port }}
  {{- end }}
  {{- if $v.tls.enabled }}
  - --tls_cert=/etc/kdt/tls/tls.crt
  - --tls_key=/etc/kdt/tls/tls.key
  {{- if $v.tls.clientCertificates }}
  - --tls_client_ca=/etc/kdt/tls/ca.crt
  {{- end }}
  {{- end }}
  {{- if $v.apiKeys.enabled }}
  - --api_keys_file=/etc/kdt/api-keys/{{ $v.apiKeys.key }}
  {{- if not $v.tls.enabled }}
  - --allow_insecure_api_keys
  {{- end }}
  {{- end }}
  {{- range include "kdt.groupSecurity" . | fromJsonArray }}
  - {{ . }}
  {{- end }}
  {{- range $v.coordinator.extraArgs }}
  - {{ . | quote }}
  {{- end }}
env:
  {{- include "kdt.env" . | nindent 2 }}
ports:
  - {name: grpc, containerPort: 50051}
  - {name: health, containerPort: 50052}
  {{- if $v.metrics.enabled }}
  - {name: metrics, containerPort: {{ int $v.metrics.port }}}
  {{- end }}
# Health is what the coordinator already knows of its ranks' heartbeats: asking adds no work to them.
startupProbe:
  grpc: {port: 50052}
  periodSeconds: {{ int $v.probes.startup.periodSeconds }}
  failureThreshold: {{ include "kdt.startupFailures" . }}
readinessProbe:
  grpc: {port: 50052}
  {{- toYaml $v.probes.readiness | nindent 2 }}
# "live" is SERVING while the process answers, also when the ranks are being restarted.
livenessProbe:
  grpc: {port: 50052, service: live}
  {{- toYaml $v.probes.liveness | nindent 2 }}
{{- with int $v.coordinator.preStopSleepSeconds }}
lifecycle:
  preStop: {sleep: {seconds: {{ . }}}}
{{- end }}
resources: {{ toYaml $v.coordinator.resources | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if not $v.multiNode.enabled }}
  - {name: sockets, mountPath: /run/kdt}
  {{- end }}
  {{- if not $v.model.shipped }}
  - {name: model, mountPath: /models, readOnly: true}
  {{- end }}
  {{- if $v.tls.enabled }}
  - {name: tls, mountPath: /etc/kdt/tls, readOnly: true}
  {{- end }}
  {{- if $v.apiKeys.enabled }}
  - {name: api-keys, mountPath: /etc/kdt/api-keys, readOnly: true}
  {{- end }}
  {{- if and $v.multiNode.enabled $v.multiNode.tlsSecretName }}
  - {name: workers-tls, mountPath: /etc/kdt/workers-tls, readOnly: true}
  {{- end }}
{{- end }}

{{- define "kdt.workers" -}}
{{- $v := .Values -}}
{{- $ranks := int (include "kdt.ranksPerPod" .) -}}
name: workers
{{ include "kdt.containerBase" . }}
command: [/opt/kdtree-engine/bin/kdt-launch]
args:
  - --role=workers
  - --model={{ include "kdt.modelDir" . }}
  {{- with include "kdt.drafterDir" . }}
  - --drafter={{ . }}
  {{- end }}
  - --tp={{ int $v.tensorParallel }}
  - --backend={{ $v.backend }}
  {{- if $v.multiNode.enabled }}
  - --worker_listen=0.0.0.0:{{ int $v.multiNode.workerPort }}
  - --ranks_per_node={{ $ranks }}
  - --node_index=$(KDT_NODE)
  # A restart of this container makes the LeaderWorkerSet recreate the whole group.
  - --on_loss=exit
  {{- else }}
  - --socket_dir=/run/kdt
  - --on_loss=restart
  - --max_restarts={{ int $v.worker.maxRestarts }}
  {{- end }}
  # The coordinator ends the workers when its requests are done; this is how long they wait for that.
  - --drain_timeout_s={{ add (int $v.coordinator.drainTimeoutSeconds) (int $v.coordinator.preStopSleepSeconds) 10 }}
  - --kv_bytes={{ int64 $v.worker.kvBytes }}
  {{- with $v.worker.kvDtype }}
  - --kv_dtype={{ . }}
  {{- end }}
  - --max_context={{ int $v.worker.maxContext }}
  - --max_rows={{ int $v.worker.maxRows }}
  {{- with int $v.worker.threads }}
  - --threads={{ . }}
  {{- end }}
  - --log_level={{ $v.worker.logLevel }}
  {{- if $v.metrics.enabled }}
  - --metrics_host=0.0.0.0
  - --metrics_port={{ int $v.metrics.port }}
  {{- end }}
  {{- with concat (include "kdt.groupSecurity" . | fromJsonArray) $v.worker.extraArgs }}
  # What every rank gets as it is.
  - --
  {{- range . }}
  - {{ . | quote }}
  {{- end }}
  {{- end }}
env:
  {{- include "kdt.env" . | nindent 2 }}
  {{- range $name, $value := $v.multiNode.enabled | ternary $v.multiNode.ncclEnv dict }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
{{- if or $v.metrics.enabled $v.multiNode.enabled }}
ports:
  {{- range $i := until $ranks }}
  {{- if $v.metrics.enabled }}
  - {name: metrics-{{ $i }}, containerPort: {{ add (int $v.metrics.port) 1 $i }}}
  {{- end }}
  {{- if $v.multiNode.enabled }}
  - {name: rank-{{ $i }}, containerPort: {{ add (int $v.multiNode.workerPort) $i }}}
  {{- end }}
  {{- end }}
{{- end }}
resources:
  requests:
    {{- toYaml ($v.worker.resources.requests | default dict) | nindent 4 }}
    {{- if eq $v.backend "cuda" }}
    {{ $v.worker.gpuResource }}: {{ $ranks }}
    {{- end }}
  limits:
    {{- toYaml ($v.worker.resources.limits | default dict) | nindent 4 }}
    {{- if eq $v.backend "cuda" }}
    {{ $v.worker.gpuResource }}: {{ $ranks }}
    {{- end }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: shm, mountPath: /dev/shm}
  {{- if not $v.multiNode.enabled }}
  - {name: sockets, mountPath: /run/kdt}
  {{- end }}
  {{- if not $v.model.shipped }}
  - {name: model, mountPath: /models, readOnly: true}
  {{- end }}
  {{- if and $v.multiNode.enabled $v.multiNode.tlsSecretName }}
  - {name: workers-tls, mountPath: /etc/kdt/workers-tls, readOnly: true}
  {{- end }}
{{- end }}

{{- define "kdt.env" -}}
# Libraries that want a home or a cache get one that can be written.
- {name: HOME, value: /tmp}
{{- if .Values.multiNode.enabled }}
- name: KDT_GROUP
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
- name: KDT_NODE
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}
